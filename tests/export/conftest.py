import pytest

from ..checkpoints.folders import convert, save
from .networks import Branching, ByImage, Plain, checkpoint_of


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory):
    """A folder of checkpoint folders. Tests must not write to them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for factory in (Plain, ByImage, Branching):
        checkpoint_of(factory, folder / factory.__name__)
    save(folder / "convnext", *convert(), check=False)
    save(folder / "efficientnet", *convert("timm:test_efficientnet"), check=False)
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(empty_folder):
    """Run each test of this folder in an empty working directory."""
