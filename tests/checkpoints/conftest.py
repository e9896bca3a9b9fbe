import shutil
from pathlib import Path

import pytest

from dcls_convert import load_converted, save_converted

from .folders import convert, outputs

KINDS = {"good": {}, "seed": {"seed": 5}, "size": {"size": 11}, "gauss": {"interpolation": "gaussian"}}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A good folder, and others to mix it up with; not to be written to."""
    base = tmp_path_factory.mktemp("good")
    for name, options in KINDS.items():
        save_converted(*convert(**options), base / name)
    return base


@pytest.fixture(scope="session")
def right(folders):
    return outputs(load_converted(folders / "good"))


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the good one."""
    return Path(shutil.copytree(folders / "good", tmp_path / "damaged"))
