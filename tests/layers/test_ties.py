"""Tied positions have one owner and one name, and stay tied whatever is done to the model."""

import copy
import io
import pickle

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.utils import ModelEmaV3
from torch import nn

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY

IMAGE = (2, 3, 32, 32)


@pytest.fixture(params=["bilinear", "gaussian"])
def converted(request, tiny):
    dcls_convert.convert_(tiny, dilated_size=9, interpolation=request.param, init="random")
    return tiny


def layers(model: nn.Module) -> list[DclsConv2d]:
    return [module for module in model.modules() if isinstance(module, DclsConv2d)]


def groups(model: nn.Module) -> list[list[int]]:
    """Which layers use the same positions tensor, and the same sigma."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(layers(model)):
        found.setdefault((id(layer.positions), id(layer.sigma)), []).append(index)
    return list(found.values())


EXPECTED_GROUPS = [[0], [1, 2], [3, 4, 5, 6], [7, 8]]  # depths 1, 2, 4, 2


def assert_tied_like(model: nn.Module, original: nn.Module) -> None:
    assert groups(model) == groups(original) == EXPECTED_GROUPS
    assert list(model.state_dict()) == list(original.state_dict())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in original.parameters()}
    registered = {id(p) for p in model.parameters()}
    assert all(id(layer.positions) in registered for layer in layers(model))


def assert_same_outputs(model: nn.Module, original: nn.Module) -> None:
    x = torch.randn(IMAGE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model.eval()(x), original.eval()(x))


def test_every_tensor_has_one_name(converted):
    state = converted.state_dict(keep_vars=True)
    assert len({id(tensor) for tensor in state.values()}) == len(state)
    assert [name for name in state if "dcls_positions" in name] == [
        f"stages.{stage}.blocks.dcls_positions" for stage in (1, 2, 3)
    ]


def test_deepcopy(converted):
    copied = copy.deepcopy(converted)
    assert_tied_like(copied, converted)
    assert_same_outputs(copied, converted)


def test_a_block_copied_alone_has_positions_of_its_own(converted):
    block = converted.stages[2].blocks[1]
    copied = copy.deepcopy(block)
    assert sum(p.numel() for p in copied.parameters()) > sum(p.numel() for p in block.parameters())
    x = torch.randn(1, 48, 8, 8)
    assert torch.equal(copied(x), block(x))
    converted.stages[2].blocks.dcls_positions.data.add_(1)
    assert not torch.equal(copied(x), block(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_to_dtype(converted, dtype):
    before = groups(converted)
    converted.to(dtype)
    assert groups(converted) == before == EXPECTED_GROUPS
    assert {layer.positions.dtype for layer in layers(converted)} == {dtype}


def test_to_empty_and_overwriting_conversions(converted):
    converted.to_empty(device="cpu")
    assert groups(converted) == EXPECTED_GROUPS
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        converted.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert groups(converted) == EXPECTED_GROUPS
    assert layers(converted)[1].positions.dtype == torch.float64


def test_meta_construction_and_assignment(converted):
    interpolation = layers(converted)[0].interpolation
    with torch.device("meta"):
        other = timm.create_model(TINY)
    dcls_convert.convert_(other, dilated_size=9, interpolation=interpolation)
    other.load_state_dict(converted.state_dict(), assign=True)
    assert groups(other) == EXPECTED_GROUPS
    assert not any(p.is_meta for p in other.parameters())
    assert_same_outputs(other, converted)


def test_pickles_of_state_and_of_the_module(converted):
    buffer = io.BytesIO()
    torch.save(converted.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other = copy.deepcopy(converted)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert_tied_like(other, converted)
    assert_same_outputs(other, converted)
    whole = pickle.loads(pickle.dumps(converted))
    assert_tied_like(whole, converted)
    assert_same_outputs(whole, converted)


def test_compile(converted):
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    x = torch.randn(IMAGE)
    converted.train()
    torch.manual_seed(0)
    compiled(x).square().sum().backward()
    found = {name: p.grad.clone() for name, p in converted.named_parameters() if "dcls_" in name}
    converted.zero_grad()
    torch.manual_seed(0)
    converted(x).square().sum().backward()
    for name, gradient in found.items():
        # float32, other orders of summation
        torch.testing.assert_close(gradient, converted.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
    assert groups(converted) == EXPECTED_GROUPS


@pytest.mark.parametrize("safe", [True, False])
def test_timm_save_for_hf(converted, tmp_path, safe):
    save_for_hf(converted, tmp_path, safe_serialization=safe)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert_tied_like(loaded, converted)
    assert_same_outputs(loaded, converted)


def test_exponential_moving_average(converted):
    averaged = ModelEmaV3(converted, decay=0.5)
    with torch.no_grad():
        converted.stages[1].blocks.dcls_positions.add_(1)
    averaged.update(converted)
    assert groups(averaged.module) == EXPECTED_GROUPS
    difference = converted.stages[1].blocks.dcls_positions - averaged.module.stages[1].blocks.dcls_positions
    torch.testing.assert_close(difference, torch.full_like(difference, 0.5))


def test_training_step_moves_shared_positions_once(converted):
    converted.double()  # layer scale starts at 1e-6, so float32 would round the steps away
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in converted.named_parameters()}
    x, target = torch.randn(IMAGE, dtype=torch.float64), torch.tensor([1, 2])
    nn.functional.cross_entropy(converted.train()(x), target).backward()
    optimizer.step()
    assert groups(converted) == EXPECTED_GROUPS
    for name, p in converted.named_parameters():
        if "dcls_" in name:
            assert not torch.equal(p, before[name])
            torch.testing.assert_close(p, before[name] - 0.1 * p.grad)


def test_the_shared_gradient_is_the_sum_over_the_layers(converted):
    converted.double()
    x = torch.randn(IMAGE, dtype=torch.float64)
    converted(x).sum().backward()
    shared = converted.stages[2].blocks.dcls_positions.grad
    apart = copy.deepcopy(converted)
    for index in range(4):
        block = apart.stages[2].blocks[index]
        block.conv_dw = copy.deepcopy(block.conv_dw)  # alone: with positions of its own
    apart.zero_grad()
    apart(x).sum().backward()
    summed = sum(apart.stages[2].blocks[index].conv_dw.positions.grad for index in range(4))
    torch.testing.assert_close(summed, shared, rtol=1e-12, atol=1e-14)
