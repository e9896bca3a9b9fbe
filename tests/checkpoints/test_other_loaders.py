"""accelerate, safetensors and loaders like transformers' and diffusers' read a folder's weights."""

import contextlib

import accelerate
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from dcls_convert.checkpoints.folder import WEIGHTS

from .folders import convert, outputs, same_states, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint folder and its model."""
    model, plan = convert()
    return save(tmp_path_factory.mktemp("loaders") / "folder", model, plan), model


def create(folder, **options):
    return timm.create_model(f"local-dir:{folder}", **options).eval()


def by_dispatch(folder):
    with accelerate.init_empty_weights():
        model = create(folder)
    return accelerate.load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"})


def by_safetensors(folder):
    model = create(folder)
    assert load_model(model, folder / WEIGHTS) == (set(), [])
    return model


def as_transformers_and_diffusers_do(folder):
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    with torch.device("meta"):
        model = create(folder)
    model.load_state_dict(load_file(folder / WEIGHTS), assign=True)
    return model


LOADERS = [by_dispatch, by_safetensors, as_transformers_and_diffusers_do]


@pytest.mark.parametrize("load", LOADERS)
def test_a_folder_is_loaded_with_equal_outputs(saved, load):
    folder, model = saved
    loaded = load(folder)
    # Not bit for bit: another memory alignment can change the order of summation.
    torch.testing.assert_close(outputs(loaded), outputs(model), rtol=1e-4, atol=1e-5)
    assert same_states(loaded, model)


@pytest.mark.parametrize("on_disk", [{0}, {1, 2, 3}])
def test_blocks_on_disk_share_positions_with_blocks_in_memory(saved, on_disk, tmp_path):
    folder, model = saved
    network = create(folder, pretrained=True)
    device_map = {"stem": "cpu", "norm_pre": "cpu", "head": "cpu"}
    for number, stage in enumerate(network.stages):
        device_map[f"stages.{number}.downsample"] = "cpu"
        for block in range(len(stage.blocks)):
            place = "disk" if block in on_disk else "cpu"
            device_map[f"stages.{number}.blocks.{block}"] = place
    accelerate.dispatch_model(network, device_map, offload_dir=tmp_path)
    torch.testing.assert_close(outputs(network), outputs(model), rtol=1e-4, atol=1e-5)
    first = network.stages[1].blocks[0].conv_dw.positions
    assert first.is_meta == (0 in on_disk)


@pytest.mark.filterwarnings("ignore")  # torch warns that copying to a meta tensor does nothing
@pytest.mark.parametrize("pretrained", [False, True])
def test_init_empty_weights_allocates_no_weights(saved, pretrained):
    with contextlib.redirect_stderr(None), accelerate.init_empty_weights():
        model = create(saved[0], pretrained=pretrained)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.state_dict().keys() == saved[1].state_dict().keys()
