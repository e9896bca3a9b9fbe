"""A converted model can be loaded from a hub, and failures are reported in one line."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import dcls_convert
from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS

from ..command_line import run
from ..hub_cache import upload
from .folders import convert, edit_json, edit_tensors, outputs, seal

pytestmark = pytest.mark.usefixtures("empty_folder")
OPTIONS = ("--dilated-size", 11, "--output", "converted")


def push(hub, model, name, **options):
    """Upload the files that timm's `push_to_hf_hub` uploads."""
    timm.models.save_for_hf(model, "pushed", safe_serialization=True)
    upload(Path("pushed"), name, hub, **options)


def from_hub(name):
    return outputs(timm.create_model(f"hf-hub:{name}", pretrained=True))


def test_each_revision_of_a_pushed_model_can_be_loaded(hub):
    model, _ = convert()
    first = outputs(model)
    push(hub, model, "me/mine", tag="v1")
    assert torch.equal(from_hub("me/mine"), first)
    with torch.no_grad():
        positions = next(
            parameter for name, parameter in model.named_parameters() if name.endswith("positions")
        )
        positions.add_(0.25)
    push(hub, model, "me/mine")
    assert torch.equal(from_hub("me/mine"), outputs(model))
    assert torch.equal(from_hub("me/mine@v1"), first)


def test_an_uploaded_folder_is_loaded_and_checked(hub, folder):
    upload(folder, "me/folder", hub)
    assert torch.equal(from_hub("me/folder"), outputs(dcls_convert.load_converted(folder)))
    edit_tensors(folder, lambda tensors: tensors["head.fc.bias"].add_(1))
    upload(folder, "me/folder", hub)
    with pytest.raises(dcls_convert.CheckpointError, match="are not those that were written"):
        from_hub("me/folder")


def test_weights_come_from_the_one_file_that_is_checked(hub, folder, folders):
    """Another file that the config names is ignored."""
    (folder / "other.safetensors").write_bytes((folders / "gauss" / WEIGHTS).read_bytes())
    names = {"hf_hub_filename": "other.safetensors", "custom_load": True}
    edit_json(folder / CONFIG, lambda config: config["pretrained_cfg"].update(names))
    seal(folder)
    upload(folder, "me/two", hub)
    assert torch.equal(from_hub("me/two"), outputs(dcls_convert.load_converted(folder)))


def test_a_checkpoint_in_the_working_folder_is_not_loaded_instead(hub, folder, monkeypatch):
    """Even if the repository has no safetensors file."""
    repository = Path(shutil.copytree(folder, "repository"))
    state = load_file(repository / WEIGHTS)
    state["head.fc.bias"] += 1
    torch.save(state, repository / "pytorch_model.bin")
    (repository / WEIGHTS).unlink()
    upload(repository, "me/old", hub)
    monkeypatch.chdir(folder)
    expected = outputs(dcls_convert.load_converted(folder)) + 1
    torch.testing.assert_close(from_hub("me/old"), expected)


def test_a_model_from_a_hub_is_converted(hub, tiny):
    push(hub, tiny, "me/plain")
    run("hf-hub:me/plain", "--pretrained", *OPTIONS, "--init", "exact")
    torch.testing.assert_close(outputs(dcls_convert.load_converted("converted")), outputs(tiny))
