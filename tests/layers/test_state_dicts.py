"""A state dict of another conversion is refused, though its names and shapes fit."""

import copy
import functools
import re

import pytest
import timm
import torch
from safetensors.torch import load, save
from torch import nn

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv1d, DclsConv2d

from ..conftest import TINY
from .test_ties import outputs

BLOCK = "stages.0.blocks.0.conv_dw"


@functools.cache
def converted(size, tie):
    torch.manual_seed(size)
    model = timm.create_model(TINY, num_classes=5, ls_init_value=1.0)
    options = {"dilated_size": size, "tie": tie, "kernel_count": 4}
    dcls_convert.convert_(model, **options, init="random", positions="uniform")
    return model


def network(size=9, tie="stage"):
    return copy.deepcopy(converted(size, tie))


def layer_of(size):
    """Return a layer with elements in the corners of its window."""
    layer = DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=size)
    with torch.no_grad():
        layer.positions[..., 0] = -(size // 2)
    return layer


def through_safetensors(state):
    return load(save(state))


@pytest.mark.parametrize("options", [{"strict": False}, {"assign": True}], ids=str)
@pytest.mark.parametrize("tie", ["stage", "none"])
def test_a_state_dict_of_a_larger_window_is_refused_in_one_line(tie, options):
    state = through_safetensors(network(17, tie).state_dict())
    with pytest.raises(RuntimeError) as error:
        network(9, tie).load_state_dict(state, **options)
    _, *lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].strip().startswith(f"{BLOCK}.positions has elements up to 3.98 cells outside")


def test_a_layer_refuses_elements_in_the_border_of_the_next_larger_window():
    with pytest.raises(RuntimeError, match="up to 1 cells outside"):
        layer_of(7).load_state_dict(layer_of(9).state_dict(), strict=False)


def test_what_is_said_of_positions_outside_of_the_window_ends_in_a_state_that_loads():
    """As after a task vector; loading a larger window's state into such a window needs no test."""
    model = network(9)
    state = through_safetensors(network(17).state_dict())
    clamps = []
    while len(clamps) < 20:  # each message names one tensor
        try:
            model.load_state_dict(state)
            break
        except RuntimeError as error:
            clamps.append(re.search(r"clamp all positions first: (.*?\))\. If", str(error))[1])
            exec(clamps[-1])
    assert 0 < len(clamps) < 20
    border = state[f"{BLOCK}.positions"].abs().max()
    assert border == 4
    assert torch.equal(model.state_dict()[f"{BLOCK}.positions"], state[f"{BLOCK}.positions"])


@pytest.mark.parametrize("through", [lambda state: state, through_safetensors])
def test_sigmas_of_a_gaussian_are_not_loaded_as_those_of_a_triangle(through):
    gaussian, triangle = (
        DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=5, interpolation=name)
        for name in ("gaussian", "triangle")
    )
    with pytest.raises(RuntimeError, match=r"values down to 0\.5 cells; triangle .* 1 or"):
        triangle.load_state_dict(through(gaussian.state_dict()), strict=False)
    with torch.no_grad():
        triangle.sigma.sub_(0.2)  # a last step
    DclsConv2d.load_state_dict(copy.deepcopy(triangle), through(triangle.state_dict()))


def test_a_state_dict_with_other_ties_is_refused_though_not_strict():
    with pytest.raises(RuntimeError, match=r"1\.conv_dw has weights but no positions in the state"):
        network(tie="none").load_state_dict(network().state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"1\.conv_dw shares positions, and has its own in the"):
        network().load_state_dict(network(tie="none").state_dict(), strict=False)


def test_weights_from_before_the_conversion_are_refused_where_their_shapes_fit():
    conv = nn.Conv1d(8, 8, 5, padding=2, groups=8)
    layer = DclsConv1d.from_conv(conv, kernel_count=5, dilated_kernel_size=11)
    with pytest.raises(RuntimeError, match="has weights but no positions in the state dict"):
        layer.load_state_dict(conv.state_dict(), strict=False)


def test_positions_that_a_last_step_left_outside_are_loaded_and_used_at_the_border():
    model = network()
    with torch.no_grad():
        model.get_parameter(f"{BLOCK}.positions").add_(0.4)
    other = network()
    other.load_state_dict(through_safetensors(model.state_dict()))
    assert torch.equal(outputs(other), outputs(model))


def test_a_part_of_a_state_dict_is_loaded():
    model = network()
    state = network().state_dict()
    head = {name: tensor + 1 for name, tensor in state.items() if name.startswith("head.")}
    block = {name: tensor + 1 for name, tensor in state.items() if "stages.1.blocks.1." in name}
    model.load_state_dict(head | block, strict=False)
    for name, tensor in (head | block).items():
        assert torch.equal(model.state_dict()[name], tensor)
