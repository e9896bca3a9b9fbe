import pytest
import timm

from dcls_convert import convert_, save_converted

from ..cli.test_bad_input import snapshot
from ..surgery.test_fold import IMAGE, tiny, trained
from .networks import ByImage, Plain, Several, checkpoint_of


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory):
    """Folders by name; not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for factory in (Plain, ByImage, Several):
        checkpoint_of(factory, folder / factory.__name__)
    save_converted(*tiny(), folder / "convnext")
    model = timm.create_model("test_efficientnet")
    plan = convert_(model, dilated_size=9, input_size=IMAGE, init="random").plan
    save_converted(trained(model), plan, folder / "efficientnet")
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
