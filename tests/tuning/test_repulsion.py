"""The repulsive loss equals its formula, and its memory is bounded."""

import itertools
import math

import pytest
import torch
from torch import nn

from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConv1d, DclsConv2d, DclsConv3d
from dcls_convert.tuning import repulsion

from ..dispatch_modes import AllocatedMemory

loss_of = repulsion.repulsion
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}


def oracle(positions: torch.Tensor) -> float:
    """Compute the formula in plain loops, for positions (A, *C, E)."""
    kernels = positions.flatten(1, -2).permute(1, 2, 0).tolist()
    pairs = [pair for kernel in kernels for pair in itertools.combinations(kernel, 2)]
    return sum(max(0.0, 1 - math.dist(*pair)) for pair in pairs) / len(pairs)


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [1, 24, repulsion.DIFFERENCES_PER_BLOCK])
@pytest.mark.parametrize("shape", [(1, 3, 2, 4), (3, 2, 1, 6), (2, 2, 1, 3, 4)])
def test_the_repulsive_loss_equals_the_formula(shape, block, monkeypatch):
    monkeypatch.setattr(repulsion, "DIFFERENCES_PER_BLOCK", block)
    positions = seeded(*shape)
    torch.testing.assert_close(loss_of(positions).item(), oracle(positions), **FLOAT64)
    # Under vmap, autograd differentiates plain operations.
    batched = torch.func.vmap(torch.func.grad(loss_of))(torch.stack([positions, 2 * positions]))
    for gradient, scale in zip(batched, (1, 2), strict=True):
        alone = (scale * positions).requires_grad_()
        loss = loss_of(alone)
        with torch.no_grad():
            alone.clamp_(-0.5, 0.5)  # as a layer may do between loss and backward
        loss.backward()
        torch.testing.assert_close(gradient, alone.grad, **FLOAT64)


def test_the_loss_of_a_model_is_the_mean_over_its_positions_tensors():
    one = DclsConv1d(
        4, 4, kernel_count=5, dilated_kernel_size=7, groups=2, interpolation="gaussian"
    )
    two, again = (DclsConv2d(2, 3, kernel_count=4, dilated_kernel_size=(5, 7)) for _ in range(2))
    three = DclsConv3d(2, 2, kernel_count=3, dilated_kernel_size=(2, 5, 5), dense_axes=[0])
    model = nn.ModuleList([one, two, again, three])
    again.tie_(two)
    model.double()
    names = ["0.positions", "1.positions", "3.positions"]
    loss = tuning.repulsive_loss(model)
    expected = sum(oracle(model.get_parameter(name).detach()) for name in names) / 3
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    (loss**2).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(names)
    assert tuning.repulsive_loss(nn.Linear(2, 2)).item() == 0
    assert loss_of(torch.zeros(2, 3, 1, 1)).item() == 0  # a single element has nothing to repel


def test_coincident_elements_have_a_finite_gradient():
    positions = torch.zeros(2, 3, 1, 4, requires_grad=True)
    loss_of(positions).backward()
    assert loss_of(positions).item() == 1.0
    assert torch.equal(positions.grad, torch.zeros_like(positions))


@pytest.mark.parametrize("shape", [(2, 64, 64, 5), (2, 40, 1, 60)])
def test_memory_stays_bounded_in_forward_and_backward(shape, monkeypatch):
    monkeypatch.setattr(repulsion, "DIFFERENCES_PER_BLOCK", 10_000)
    positions = torch.randn(shape, requires_grad=True)
    with AllocatedMemory([positions]) as memory:
        loss_of(positions).backward()
    assert positions.numel() <= max(memory.numbers()) <= max(positions.numel(), 10_000)
    assert max(memory.numbers()) < positions[0].numel() * shape[-1]  # all distances at once
