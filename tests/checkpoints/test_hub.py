"""A converted model can be loaded from a hub, and failures are reported in one line."""

from pathlib import Path

import pytest
import timm
import torch

import dcls_convert
from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS

from ..command_line import run
from ..hub_cache import upload
from .folders import edit_json, edit_tensors, outputs, seal

pytestmark = pytest.mark.usefixtures("empty_folder")
OPTIONS = ("--dilated-size", 11, "--output", "converted")


def from_hub(name):
    return outputs(timm.create_model(f"hf-hub:{name}", pretrained=True))


def test_an_uploaded_folder_is_loaded_and_checked(hub, folder):
    upload(folder, "me/folder", hub)
    assert torch.equal(from_hub("me/folder"), outputs(dcls_convert.load_converted(folder)))
    edit_tensors(folder, lambda tensors: tensors["head.fc.bias"].add_(1))
    upload(folder, "me/folder", hub)
    with pytest.raises(
        dcls_convert.CheckpointError, match="differ from the tensors that were written"
    ):
        from_hub("me/folder")


def test_weights_come_from_the_one_file_that_is_checked(hub, folder, folders):
    """Another file that the config names is ignored."""
    (folder / "other.safetensors").write_bytes((folders / "gauss" / WEIGHTS).read_bytes())
    names = {"hf_hub_filename": "other.safetensors", "custom_load": True}
    edit_json(folder / CONFIG, lambda config: config["pretrained_cfg"].update(names))
    seal(folder)
    upload(folder, "me/two", hub)
    assert torch.equal(from_hub("me/two"), outputs(dcls_convert.load_converted(folder)))


def test_a_model_from_a_hub_is_converted(hub, tiny):
    timm.models.save_for_hf(tiny, "pushed", safe_serialization=True)
    upload(Path("pushed"), "me/plain", hub)
    run("hf-hub:me/plain", "--pretrained", *OPTIONS, "--init", "exact")
    torch.testing.assert_close(outputs(dcls_convert.load_converted("converted")), outputs(tiny))
