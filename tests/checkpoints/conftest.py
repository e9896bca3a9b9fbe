import copy
import shutil
from pathlib import Path

import pytest

from dcls_convert import save_converted

from .folders import convert, save

# Name of another folder -> the options of `convert` in which it differs from the good one.
OTHERS = {"seed": {"seed": 5}, "size": {"size": 11}, "gauss": {"interpolation": "gaussian"}}


@pytest.fixture(scope="session")
def _converted():
    return convert()


@pytest.fixture
def converted(_converted):
    """The model and plan of the good folder; a copy that may be changed."""
    return copy.deepcopy(_converted)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, _converted):
    """A good folder, and others whose files can be mixed in. Tests must not write to them."""
    base = tmp_path_factory.mktemp("good")
    save_converted(*_converted, base / "good")
    for name, options in OTHERS.items():
        save(base / name, *convert(**options))
    return base


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the good folder, which may be changed."""
    return Path(shutil.copytree(folders / "good", tmp_path / "copy"))
