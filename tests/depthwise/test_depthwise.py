"""The depthwise convolution equals torch's in values, memory format and gradients of any order, in
every mode.
"""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dcls_convert.depthwise import onednn, products, table

from ..layers.common import close, randn
from .by_table import conv2d

FLOAT64_ATOL = 1e-11  # for sums of a few thousand products of numbers of order 1
MAX_PADDING_COLUMNS = 6
every_way = pytest.mark.parametrize("way", ["onednn", "products"])


def prefer(patch, way):
    """Choose as in a process whose environment prefers this algorithm."""
    patch.setattr(table, "preference", lambda: way)


@contextmanager
def computed_by(way):
    """Compute convolutions of any dtype by this algorithm inside a `with` block, on any processor.

    Yields a function that knows whether it was called.
    """
    module = {"onednn": onednn, "products": products}[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "max_padding_columns", lambda: MAX_PADDING_COLUMNS)
        patch.setattr(onednn, "DTYPES", table.PRODUCTS_DTYPES)
        prefer(patch, way)
        name = f"depthwise_by_{way}"
        patch.setattr(module, name, algorithm := Mock(wraps=getattr(module, name)))
        yield algorithm


DEFAULTS = {
    "stride": (1, 1),
    "channels_last": False,
    "channels": 3,
    "batch": 2,
    "bias": True,
    "max_at_once": 2**29,  # 1 means a part per image
    "kernels_per_channel": 1,
}


def make_case(window, padding, side, **changes):
    return {"window": window, "padding": padding, "side": side, **DEFAULTS, **changes}


@st.composite
def cases(draw, max_side=24):
    window = draw(st.tuples(st.integers(1, max_side), st.integers(1, max_side)))
    padding = tuple(draw(st.integers(0, size + 1)) for size in window)
    min_side = [max(1, size - 2 * pad) for size, pad in zip(window, padding, strict=True)]
    side = tuple(draw(st.integers(low, low + max_side)) for low in min_side)
    flags = st.booleans()
    counts = st.integers(1, 3)
    parts = st.sampled_from([1, 2**29])
    options = {
        "channels_last": flags,
        "bias": flags,
        "channels": counts,
        "batch": counts,
        "max_at_once": parts,
    }
    return make_case(window, padding, side, **draw(st.fixed_dictionaries(options)))


def tensors(case, dtype=torch.float64):
    channels = case["channels"]
    kernels = channels * case["kernels_per_channel"]
    input = randn(case["batch"], channels, *case["side"])
    if case["channels_last"]:
        input = input.to(memory_format=torch.channels_last)
    kernel = randn(kernels, 1, *case["window"], seed=1)
    bias = [randn(kernels, seed=2)] if case["bias"] else []
    arguments = case["stride"], case["padding"], (1, 1), channels
    return [tensor.to(dtype).requires_grad_() for tensor in (input, kernel, *bias)], arguments


def call(function, inputs, arguments):
    return function(*inputs, *[None] * (3 - len(inputs)), *arguments)


def outputs_and_gradients(function, inputs, arguments):
    output = call(function, inputs, arguments)
    grad_output = randn(*output.shape, seed=1)
    return [output, *torch.autograd.grad((output * grad_output.to(output.dtype)).sum(), inputs)]


def strides_that_matter(tensor):
    """Return strides without those of axes of one cell, which no memory format determines."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@every_way
@example(make_case((17, 17), (8, 8), (28, 30)))
@example(make_case((1, 1), (0, 0), (1, 17), channels_last=True, channels=2, batch=1))
@example(make_case((17, 17), (8, 8), (14, 7), channels_last=True))
@example(make_case((51, 49), (25, 24), (30, 15), max_at_once=1))
@example(make_case((14, 15), (7, 6), (20, 9), stride=(2, 1)))
@example(make_case((17, 17), (0, 0), (19, 18), stride=(3, 1), channels_last=True))
@example(make_case((7, 7), (9, 9), (1, 1)))
@example(make_case((17, 17), (8, 8), (9, 20), kernels_per_channel=2))
@example(make_case((7, 17), (3, 8), (5, 16), batch=0))
@given(case=cases())
def test_values_memory_format_and_gradients_are_those_of_torch(way, case):
    inputs, arguments = tensors(case)
    with pytest.MonkeyPatch.context() as patch, computed_by(way):
        # With 1: one image at a time.
        patch.setattr(onednn, "MAX_GRADIENT_FLOATS", case["max_at_once"])
        ours = outputs_and_gradients(conv2d, inputs, arguments)
    theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
    close(ours, theirs, FLOAT64_ATOL)
    formats_differ = case["channels"] > 1 and ours[0].shape[2:].numel() > 1
    if formats_differ:
        assert strides_that_matter(ours[0]) == strides_that_matter(theirs[0])


@pytest.mark.slow
@every_way
@given(case=cases(max_side=3))
def test_first_and_second_gradients_equal_finite_differences(way, case):
    inputs, arguments = tensors({**case, "channels": 2})
    with pytest.MonkeyPatch.context() as patch, computed_by(way):
        patch.setattr(onednn, "MIN_GRADIENT_CELLS", 1)
        patch.setattr(products, "MAX_PATCH_SIDE", 2)
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(
                lambda *tensors: call(conv2d, tensors, arguments).tanh(),
                inputs,
                fast_mode=True,
            )


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_little_more_than_torchs(way, dtype):
    inputs, arguments = tensors(make_case((17, 17), (8, 8), (28, 28), channels=4, batch=4), dtype)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = outputs_and_gradients(F.conv2d, exact_inputs, arguments)
    theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
    with computed_by(way) as algorithm:
        ours = outputs_and_gradients(conv2d, inputs, arguments)
    assert algorithm.called
    # In float32, oneDNN adds in an order of its own.
    factor = 10 if (way, dtype) == ("onednn", torch.float32) else 1.5
    for result, torch_result, expected in zip(ours, theirs, exact, strict=True):
        assert result.dtype == dtype
        rounding = 0.5 * torch.finfo(dtype).eps * expected.norm()
        torch_error = (torch_result - expected).norm()
        assert (result - expected).norm() <= factor * max(torch_error, rounding)


WIDE = make_case((7, 17), (3, 8), (5, 16), channels=2)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float64 is not cast
def test_autocast_gives_what_torch_gives_under_it(way, dtype):
    """No farther from float64 than torch, whose sums in bfloat16 differ between processors."""
    exact = outputs_and_gradients(F.conv2d, *tensors(WIDE))
    inputs, arguments = tensors(WIDE, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = outputs_and_gradients(F.conv2d, inputs, arguments)
        with computed_by(way) as algorithm:
            ours = outputs_and_gradients(conv2d, inputs, arguments)
    assert algorithm.called
    for number, tensor in enumerate(ours):
        assert tensor.dtype == theirs[number].dtype
        error_of_torch = (theirs[number] - exact[number]).abs().max().item()
        close(tensor.double(), exact[number], atol=max(error_of_torch, 0.25))


@every_way
def test_a_flop_counter_counts_the_convolution(way):
    inputs, arguments = tensors(make_case((17, 17), (8, 8), (14, 14), channels=4))
    counts = []
    for convolve in (conv2d, F.conv2d):
        with computed_by(way) as algorithm, FlopCounterMode(display=False) as counter:
            outputs_and_gradients(convolve, inputs, arguments)
        counts.append(counter.get_total_flops())
    assert not algorithm.called
    assert counts[0] == counts[1] > 0
