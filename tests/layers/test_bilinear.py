"""Bilinear construction has derivatives of any order and mode, in memory of a bounded size.

Its values and first gradients are tested in `test_interpolation`.
"""

import math

import pytest
import torch

from dcls_convert.layers import bilinear
from dcls_convert.layers.bilinear import bilinear_kernel
from dcls_convert.layers.construction import construct_kernel

from ..dispatch_modes import AllocatedMemory
from .common import randn
from .gpu_construction import ON_GPUS, constructed

# torch itself uses torch.jit.script when forward derivatives are first computed.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def inputs(size, channels, count=4):
    """Return weight (*C, E) and positions (A, *C, E) between cells, inside the window."""
    weight = randn(*channels, count)
    positions = torch.empty(len(size), *weight.shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for coordinate, length in zip(positions, size, strict=True):
        cells = torch.randint(max(length - 1, 1), weight.shape, generator=generator)
        fractions = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
        coordinate.copy_(cells - length // 2 + 0.3 + 0.4 * fractions)
    return weight.requires_grad_(), positions.requires_grad_()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(5,), (1, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("implementation", [None, "plain", *ON_GPUS])
def test_derivatives_of_all_orders_and_modes_are_exact(size, implementation):
    tensors = inputs(size, channels=(2, 1), count=2)

    def kernel(*tensors):
        return construct_kernel(*tensors, size)

    with constructed(implementation):
        assert torch.autograd.gradcheck(
            kernel, tensors, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(kernel, tensors)


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("size", [(9,), (4, 3, 6)], ids=str)
def test_only_kernel_positions_and_gradients_grow_with_the_layer(size, implementation, monkeypatch):
    monkeypatch.setattr(bilinear, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(bilinear, "MAX_PRODUCTS", products := 100 * math.prod(size))
    tensors = inputs(size, channels=(40, 25))
    kernel_gradient = randn(40, 25, *size)
    with constructed(implementation), AllocatedMemory([*tensors, kernel_gradient]) as memory:
        kernel = bilinear_kernel(*tensors, size)
        gradients = torch.autograd.grad(kernel, tensors, kernel_gradient)
    # The largest tensor of a block holds all corners of its elements.
    block = products if implementation else 64 * torch.get_num_threads() * 2 ** len(size)
    whole = {tensor.numel() for tensor in (kernel, tensors[1], *gradients)}
    assert {numbers for numbers in memory.numbers() if numbers > block} <= whole
