"""Bilinear construction in blocks equals construction by plain operations, however it is
differentiated.
"""

import contextlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, vmap

from dcls_convert.depthwise.eager import is_eager
from dcls_convert.layers import bilinear
from dcls_convert.layers.bilinear import bilinear_kernel

from ..dispatch_modes import AllocatedMemory
from .common import close, randn
from .gpu_construction import IMPLEMENTATIONS, as_on_a_gpu

# torch itself uses torch.jit.script when forward derivatives are first computed.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def by_plain_operations(weight, positions, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bilinear, "is_eager", lambda *_: False)
        return bilinear_kernel(weight, positions, size)


@contextlib.contextmanager
def constructed(implementation):
    """Construct kernels as for exports, on a GPU or on the CPU, inside a `with` block."""
    with (
        pytest.MonkeyPatch.context() as patch,
        as_on_a_gpu(None if implementation == "exported" else implementation),
    ):
        if implementation == "exported":
            patch.setattr(bilinear, "is_eager", lambda *_: False)
            patch.setattr(bilinear, "is_exporting", lambda: True)
        yield


def inputs(size, channels=(2, 3), count=4, seed=0):
    """Return weight (*C, E) and positions (A, *C, E) on and between cells, inside the window, at
    its border, and beyond.
    """
    weight = randn(*channels, count, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    positions = torch.rand(len(size), *weight.shape, generator=generator, dtype=torch.float64) - 0.5
    positions *= 1.4 * torch.tensor(size).view(-1, *[1] * weight.dim())
    is_on_cell = torch.rand(positions.shape, generator=generator) < 0.4
    return weight, torch.where(is_on_cell, positions.round(), positions)


def grad_output(kernel):
    return randn(*kernel.shape, seed=1)


def kernel_and_gradients(construct, tensors, size, learnt, create_graph=False):
    tensors = [
        tensor.detach().requires_grad_(is_learnt)
        for tensor, is_learnt in zip(tensors, learnt, strict=True)
    ]
    kernel = construct(*tensors, size)
    leaves = list(itertools.compress(tensors, learnt))
    return kernel, *torch.autograd.grad(
        kernel, leaves, grad_output(kernel), create_graph=create_graph
    )


@given(
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    channels=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(
        tuple
    ),  # a dense axis is one channel more
    count=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    block=st.sampled_from([1, 7, 500, 1 << 26]),
    implementation=st.sampled_from([None, "exported", *IMPLEMENTATIONS]),
    strided=st.booleans(),
    learnt=st.sampled_from([(True, True), (True, False), (False, True)]),  # weight, positions
    create_graph=st.booleans(),
)
def test_kernel_and_gradients_are_those_of_plain_operations(
    size, channels, count, seed, block, implementation, strided, learnt, create_graph
):
    tensors = inputs(size, channels, count, seed)
    with constructed(implementation), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bilinear, "BLOCK_ELEMENTS", block)
        patch.setattr(bilinear, "MAX_PRODUCTS", block)
        fast_inputs = [tensor.mT.contiguous().mT for tensor in tensors] if strided else tensors
        fast = kernel_and_gradients(bilinear_kernel, fast_inputs, size, learnt, create_graph)
    close(fast, kernel_and_gradients(by_plain_operations, tensors, size, learnt))


# Ways of differentiating.


@pytest.mark.slow
@pytest.mark.parametrize("size", [(5,), (1, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("implementation", [None, "exported", *IMPLEMENTATIONS])
def test_derivatives_of_all_orders_and_modes_are_exact(size, implementation):
    weight, positions = inputs(size, channels=(2,), count=2)
    lowest = [
        place.floor().clamp(-(length // 2), max(length - 2, 0) - length // 2)
        for place, length in zip(positions, size, strict=True)
    ]
    between = torch.stack(lowest) + 0.3 + 0.4 * torch.rand(positions.shape, dtype=torch.float64)
    tensors = [tensor.requires_grad_() for tensor in (weight, between)]

    def kernel(*tensors):
        return bilinear_kernel(*tensors, size)

    with constructed(implementation):
        assert torch.autograd.gradcheck(
            kernel, tensors, check_forward_ad=True, check_batched_grad=True
        )
        assert torch.autograd.gradgradcheck(kernel, tensors)


def test_function_transforms_give_what_they_give_for_plain_operations():
    size = (1, 4)
    tensors = inputs(size, channels=(2, 2), count=2)

    def results(construct):
        def loss(*tensors):
            return construct(*tensors, size).sin().sum()

        return hessian(loss, (0, 1))(*tensors), vmap(grad(loss, (0, 1)), in_dims=(1, 2))(*tensors)

    close(results(bilinear_kernel), results(by_plain_operations))


# Memory and dispatch.


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("size", [(9,), (4, 3, 6)], ids=str)
def test_only_kernel_positions_and_gradients_grow_with_the_layer(size, implementation, monkeypatch):
    monkeypatch.setattr(bilinear, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(bilinear, "MAX_PRODUCTS", products := 100 * math.prod(size))
    tensors = [tensor.requires_grad_() for tensor in inputs(size, channels=(40, 25))]
    kernel_gradient = grad_output(torch.empty(40, 25, *size))
    with as_on_a_gpu(implementation), AllocatedMemory([*tensors, kernel_gradient]) as memory:
        kernel = bilinear_kernel(*tensors, size)
        gradients = torch.autograd.grad(kernel, tensors, kernel_gradient)
    # The largest tensor of a block holds all corners of its elements.
    block = products if implementation else 64 * torch.get_num_threads() * 2 ** len(size)
    whole = {tensor.numel() for tensor in (kernel, tensors[1], *gradients)}
    assert {numbers for numbers in memory.numbers() if numbers > block} <= whole


def test_subclasses_of_tensor_do_not_use_the_fast_implementation():
    ordinary = torch.ones(1)
    assert is_eager(ordinary, nn.Parameter(ordinary))
    with FakeTensorMode() as mode:
        assert not is_eager(ordinary, mode.from_tensor(ordinary))
