import copy
import shutil
from pathlib import Path

import pytest

from dcls_convert import save_converted

from .folders import convert, save


@pytest.fixture(scope="session")
def _converted():
    return convert()


@pytest.fixture
def converted(_converted):
    """The model and plan of the good folder; a copy that may be changed."""
    return copy.deepcopy(_converted)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, _converted):
    """Two good folders. Tests must not write to them."""
    base = tmp_path_factory.mktemp("good")
    save_converted(*_converted, base / "good")
    save(base / "gauss", *convert(interpolation="gaussian"))
    return base


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the first good folder, which may be changed."""
    return Path(shutil.copytree(folders / "good", tmp_path / "copy"))
