"""A state dict of another conversion is refused, though its names and shapes fit."""

import io

import pytest
import timm
import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils import parametrize

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY
from .test_ties import outputs

BLOCK = "stages.0.blocks.0.conv_dw"
OUTSIDE = "cells outside of the window 9x9, so they are of a larger window; load it"


def network(size=9, tie="stage", interpolation="bilinear"):
    torch.manual_seed(size)
    model = timm.create_model(TINY, num_classes=5, ls_init_value=1.0)
    options = {"dilated_size": size, "tie": tie, "interpolation": interpolation}
    dcls_convert.convert_(model, **options, init="random", positions="uniform", kernel_count=4)
    return model


def through_safetensors(state):
    return load(save(state))


def through_torch(state):
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("tie", ["stage", "none"])
@pytest.mark.parametrize(
    ("through", "message"),
    [
        (through_safetensors, f"{BLOCK}.positions has elements up to 3.98 {OUTSIDE}"),
        (through_torch, f"{BLOCK} has window 9x9, bilinear, and in the state dict 17x17, bilinear"),
    ],
)
def test_a_state_dict_of_a_larger_window_is_refused_in_one_line(
    through, message, tie, assign, strict
):
    state = through(network(17, tie).state_dict())
    with pytest.raises(RuntimeError) as error:
        network(9, tie).load_state_dict(state, assign=assign, strict=strict)
    _, *lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].strip().startswith(message)


def test_a_state_dict_of_the_next_larger_window_is_refused_without_metadata():
    state = through_safetensors(network(9).state_dict())
    with pytest.raises(RuntimeError, match=r"elements up to 0\.99 cells outside"):
        network(7).load_state_dict(state)


def test_a_state_dict_with_other_dense_axes_is_refused_by_its_metadata():
    one, other = (
        DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=9, dense_axes=[axis])
        for axis in (0, 1)
    )
    with pytest.raises(RuntimeError, match=r"9x9, bilinear, dense axes \(0,\), and in the state"):
        one.load_state_dict(through_torch(other.state_dict()))


def test_a_layer_with_parametrised_positions_loads_its_own_state_dict():
    layer = DclsConv2d(2, 2, kernel_count=3, dilated_kernel_size=9)
    parametrize.register_parametrization(layer, "positions", nn.Tanh())
    assert layer.load_state_dict(layer.state_dict()) == ([], [])


def test_a_state_dict_of_a_smaller_window_or_another_interpolation_is_refused_by_its_metadata():
    for other in (network(7), network(9, interpolation="triangle")):
        with pytest.raises(RuntimeError, match=f"{BLOCK} has window 9x9, bilinear, and in the"):
            network().load_state_dict(through_torch(other.state_dict()), strict=False)


def test_a_state_dict_with_other_ties_is_refused_though_not_strict():
    with pytest.raises(RuntimeError, match=r"1\.conv_dw has weights but no positions in the state"):
        network(tie="none").load_state_dict(network().state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"1\.conv_dw shares positions, and has its own in the"):
        network().load_state_dict(network(tie="none").state_dict(), strict=False)


def test_weights_from_before_the_conversion_are_refused_where_their_shapes_fit():
    def audio():
        def conv():
            return nn.Conv1d(8, 8, 5, 1, 2, groups=8)

        return nn.Sequential(nn.Conv1d(1, 8, 1), nn.Sequential(conv(), nn.GELU(), conv()))

    model = audio()
    options = {"dilated_size": 11, "kernel_count": 5, "input_size": (1, 64)}
    dcls_convert.convert_(model, init="random", **options)
    with pytest.raises(RuntimeError, match=r"1\.0 has weights but no positions in the state dict"):
        model.load_state_dict(audio().state_dict(), strict=False)


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
