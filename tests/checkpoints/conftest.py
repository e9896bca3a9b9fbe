import copy
import shutil
from pathlib import Path

import pytest

from dcls_convert import save_converted

from .folders import convert, save

KINDS = {"seed": {"seed": 5}, "size": {"size": 11}, "gauss": {"interpolation": "gaussian"}}


@pytest.fixture(scope="session")
def _converted():
    return convert()


@pytest.fixture
def converted(_converted):
    """A model and its plan, as of the good folder."""
    return copy.deepcopy(_converted)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, _converted):
    """A good folder, and others to mix it up with; not to be written to."""
    base = tmp_path_factory.mktemp("good")
    save_converted(*_converted, base / "good")
    for name, options in KINDS.items():
        save(base / name, *convert(**options))
    return base


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the good one."""
    return Path(shutil.copytree(folders / "good", tmp_path / "copy"))
