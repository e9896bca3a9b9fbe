"""Weights from a file become the model's own tensors, without a second copy.

The model equals one that is built with values and loaded.
"""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource
from dcls_convert.weights.files import read_weights
from dcls_convert.weights.loading import assign_weights_, load_weights_

FAMILIES = {
    "timm:test_convnext": {},
    "timm:test_vit": {},
    "timm:resnetblur18": {},  # blur kernels, not in the file
    # Relative positions are computed.
    "timm:swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1), "embed_dim": 24},
    "torchvision:mnasnet0_5": {},  # reads the version of its format
    "torchvision:ssdlite320_mobilenet_v3_large": {},  # anchors in a plain attribute
}
# Some tensors of these are random or computed, and not in the file, so they are built on the CPU.
BUILT_ON_CPU = {"timm:resnetblur18", "timm:swin_tiny_patch4_window7_224"}


def tensors_of(model):
    """All tensors of a model by place, also those in plain attributes, which no state dict has."""
    return {
        f"{name}.{key}.{index}": leaf
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        for index, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, torch.Tensor)
    }


def check_equal_tensors(filled, ordinary):
    ours = tensors_of(filled)
    theirs = tensors_of(ordinary)
    assert ours.keys() == theirs.keys()
    for place, tensor in theirs.items():
        mine = ours[place]
        assert (mine.dtype, mine.device, mine.stride()) == (
            tensor.dtype,
            tensor.device,
            tensor.stride(),
        ), place
        assert (mine.requires_grad, type(mine)) == (tensor.requires_grad, type(tensor)), place
        assert torch.equal(mine, tensor), place
        assert mine.data_ptr() % 64 == 0, place  # or rounding changes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_filled_from_a_file_equals_one_that_is_built_and_loaded(tmp_path, name):
    source = ModelSource(name=name, args=FAMILIES[name])
    save_file(build_model(source, seed=1).state_dict(), tmp_path / "w.safetensors")
    meta = build_model(source, device="meta")
    filled = assign_weights_(meta, read_weights(tmp_path / "w.safetensors"), "file")
    assert filled == (name not in BUILT_ON_CPU)
    if filled:
        ordinary = build_model(source, seed=0)
        load_weights_(ordinary, read_weights(tmp_path / "w.safetensors"), "file")
        check_equal_tensors(meta, ordinary)
        assert [m.training for m in meta.modules()] == [m.training for m in ordinary.modules()]


def test_a_view_in_a_file_does_not_share_its_memory_with_the_model():
    whole = torch.arange(8.0)
    views = nn.Linear(4, 1, device="meta")
    assert assign_weights_(
        views, {"weight": whole[:4].reshape(1, 4), "bias": whole[4:5].half()}, "file"
    )
    with torch.no_grad():
        views.weight.zero_()
    assert torch.equal(whole, torch.arange(8.0))
    assert (views.bias.item(), views.bias.dtype) == (4, torch.float32)
