"""Tied positions have one owner and one name, and stay tied whatever is done to the model."""

import copy
import io

import pytest
import timm
import torch
from safetensors.torch import load, save
from torch import nn

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY
from .common import randn

EXPECTED_GROUPS = [[0], [1, 2], [3, 4, 5, 6], [7, 8]]  # depths 1, 2, 4, 2
OPTIONS = {"dilated_size": 9, "interpolation": "gaussian"}  # positions and sigmas are tied


@pytest.fixture(scope="module")
def converted():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(TINY).eval()
    dcls_convert.convert_(model, **OPTIONS, init="random")
    return model


@pytest.fixture(scope="module")
def converted_on_meta():
    with torch.device("meta"):
        model = timm.create_model(TINY)
    dcls_convert.convert_(model, **OPTIONS)
    return model


def layers(model: nn.Module) -> list[DclsConv2d]:
    return [module for module in model.modules() if isinstance(module, DclsConv2d)]


def groups(model: nn.Module) -> list[list[int]]:
    """Group the indices of layers that use the same positions and the same sigma."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(layers(model)):
        members.setdefault((id(layer.positions), id(layer.sigma)), []).append(index)
    return list(members.values())


def assert_is_copy(model: nn.Module, original: nn.Module) -> None:
    """Check that the model has ties and tensors of its own, and the original's outputs."""
    assert groups(model) == EXPECTED_GROUPS
    state = model.state_dict(keep_vars=True)
    assert list(state) == list(original.state_dict())
    assert len({id(tensor) for tensor in state.values()}) == len(state)  # every tensor has one name
    assert not {id(p) for p in model.parameters()} & {id(p) for p in original.parameters()}
    assert {id(layer.positions) for layer in layers(model)} <= {id(p) for p in model.parameters()}
    image = randn(2, 3, 32, 32, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model.eval()(image), original.eval()(image))


def saved_and_loaded(model, *, weights_only):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def assigned(model, on_meta):
    on_meta.load_state_dict(saved_and_loaded(model.state_dict(), weights_only=True), assign=True)
    return on_meta


def emptied(model, on_meta):
    on_meta.to_empty(device="cpu").load_state_dict(load(save(model.state_dict())))
    return on_meta


COPIES = {
    "another dtype and back": lambda model, _: copy.deepcopy(model).double().float(),
    "deepcopy of its container": lambda model, _: copy.deepcopy(nn.Sequential(nn.ReLU(), model))[1],
    "torch.save": lambda model, _: saved_and_loaded(model, weights_only=False),
    "meta and assign": assigned,
    "to_empty and safetensors": emptied,
}


@pytest.mark.parametrize("way", COPIES)
def test_ties_survive_copying(converted, converted_on_meta, way):
    copied = COPIES[way](converted, copy.deepcopy(converted_on_meta))
    assert_is_copy(copied, converted)
    before = [layer.kernel() for layer in layers(copied)]
    owner = copied.stages[2].blocks
    # The parameter is replaced, not changed in place: layers look it up at each use.
    owner.dcls_positions = nn.Parameter(owner.dcls_positions.detach() + 0.4)
    changed = [
        not torch.equal(old, layer.kernel())
        for old, layer in zip(before, layers(copied), strict=True)
    ]
    assert [index for index, is_changed in enumerate(changed) if is_changed] == EXPECTED_GROUPS[2]


CHANGES = {
    "to its own dtype": {"dtype": torch.float32},
    "another dtype": {"dtype": torch.float64},
    "another memory format": {"memory_format": torch.channels_last},
    "both": {"dtype": torch.float16, "memory_format": torch.channels_last},
}


@pytest.fixture(params=[False, True], ids=["set data", "swap"])
def _conversion(request):
    """Use each of nn.Module's two ways to give parameters new values."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def with_gradients(model):
    """Return a copy after a backward pass."""
    copied = copy.deepcopy(model)
    copied(randn(1, 3, 32, 32, dtype=torch.float32)).square().sum().backward()
    return copied


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("prepared", [copy.deepcopy, with_gradients])
def test_ties_values_and_gradients_survive_conversions(converted, prepared, change):
    model = prepared(converted)
    options = CHANGES[change]
    ids = [id(parameter) for parameter in model.parameters()]
    values = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
    assert model.to(**options) is model
    assert groups(model) == EXPECTED_GROUPS
    # Optimizers hold references to the parameters.
    assert [id(parameter) for parameter in model.parameters()] == ids
    dtype = options.get("dtype", torch.float32)
    for parameter, value, gradient in zip(model.parameters(), values, gradients, strict=True):
        assert torch.equal(parameter, value.to(dtype))
        assert parameter.requires_grad
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert torch.equal(parameter.grad, gradient.to(dtype))


@pytest.mark.usefixtures("_conversion")
@pytest.mark.parametrize("prepared", [copy.deepcopy, with_gradients])
def test_ties_survive_to_empty(converted, prepared):
    model = prepared(converted)
    model.to_empty(device="cpu")
    assert groups(model) == EXPECTED_GROUPS
    model.load_state_dict(converted.state_dict())
    assert_is_copy(model, converted)


def test_tied_positions_are_named_by_their_stage_and_shown_as_tied(converted):
    names = {name for name in converted.state_dict() if "dcls_positions" in name}
    assert names == {f"stages.{stage}.blocks.dcls_positions" for stage in (1, 2, 3)}
    assert "positions=tied" in repr(layers(converted)[1])


def test_a_part_copied_alone_has_positions_of_its_own(converted):
    blocks = copy.deepcopy(converted).stages[2].blocks
    block = blocks[1]
    shared = blocks.dcls_positions.requires_grad_(False)
    copied = copy.deepcopy(block)
    assert not copied.conv_dw.is_tied
    assert copied.get_parameter("conv_dw.positions").requires_grad is False
    x = torch.randn(1, 48, 8, 8)
    assert torch.equal(copied(x), block(x))
    shared.data.add_(1)
    assert not torch.equal(copied(x), block(x))
