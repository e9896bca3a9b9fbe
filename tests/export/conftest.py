import pytest

from dcls_convert import save_converted

from ..checkpoints.folders import convert
from .networks import Branching, ByImage, Plain, checkpoint_of


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory):
    """Folders by name; not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for factory in (Plain, ByImage, Branching):
        checkpoint_of(factory, folder / factory.__name__)
    save_converted(*convert(), folder / "convnext")
    save_converted(*convert("timm:test_efficientnet"), folder / "efficientnet")
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
