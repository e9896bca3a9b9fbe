"""Depthwise convolution of two axes that takes oneDNN's fast kernels on the CPU: same outputs and gradients, sooner.

Axes: N batch, C channels, H x W a map, R x S the window.

Measured with ONEDNN_VERBOSE=1 (torch 2.15, oneDNN 3.13): contiguous maps go to the kernel `jit_dw` only if at most 6
columns of padding stand to their left (4 with AVX2 alone), and fewer than the window has; else to the slow `gemm:jit`.
A window of 17 columns needs 8. So columns that are too many are put around the map beforehand. And the
gradient of the weight is always `gemm:jit`, save for narrow windows on channels_last maps; it is itself a depthwise
convolution, of every map with the gradient of its output as its window, for which `jit_dw` serves.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .geometry import Padding

MOST_COLUMNS = {"AVX512": 6, "AVX2": 4}  # of padding; on other processors nothing has been measured, or changes
DTYPES = frozenset({torch.float32, torch.bfloat16})  # that oneDNN convolves; others never were faster one way
FEWEST_CELLS = 49  # of a window whose gradient is convolved; for smaller ones on channels_last maps it may not pay
PART = 2**22  # numbers in the per-image gradients of a window that are held at once

# Nothing public says so; a torch that has lost it goes the way that is right everywhere.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)

Pair = tuple[int, int]


def conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """As `torch.nn.functional.conv2d`, in values, memory format and gradients of any order.

    Differs in the way only for depthwise convolutions on the CPU, outside of torch.func's transforms and of compiled,
    exported and traced programs, in which a compiler chooses the way.
    """
    limit = _limit(input, kernel, groups)
    if limit is None or isinstance(padding, str) or tuple(dilation) != (1, 1):
        return F.conv2d(input, kernel, bias, cast(Any, stride), cast(Any, padding), cast(Any, dilation), groups)
    steps, sides = (stride[0], stride[1]), (padding[0], padding[1])
    if _convolves_gradient(input, kernel):
        return cast(Tensor, _DepthwiseConv.apply(input, kernel, bias, steps, sides, limit))
    return _forward(input, kernel, bias, steps, sides, limit)


def _limit(input: Tensor, kernel: Tensor, groups: int) -> int | None:
    """Columns of padding that the fast kernel takes; None where the convolution is better left alone.

    By exact type, since subclasses (fake tensors, proxies of tracers, tensors spread over ranks) may hold no numbers.
    """
    if type(input) is not Tensor or input.device.type != "cpu" or input.dim() != 4 or input.dtype not in DTYPES:
        return None
    if kernel.shape[1] != 1 or groups != input.shape[1] or input.dtype != kernel.dtype:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None
    if _transforms_active():  # memory formats are not known under vmap
        return None
    return _most_columns()


@functools.cache
def _most_columns() -> int | None:
    return MOST_COLUMNS.get(torch.backends.cpu.get_cpu_capability())


def _convolves_gradient(input: Tensor, kernel: Tensor) -> bool:
    pays = kernel.shape[0] == input.shape[1] and kernel.shape[-2] * kernel.shape[-1] >= FEWEST_CELLS
    # Under autocast, F.conv2d changes its arguments' dtype, which must be seen by autograd.
    return pays and torch.is_grad_enabled() and kernel.requires_grad and not torch.is_autocast_enabled("cpu")


def _forward(input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, limit: int) -> Tensor:
    rows, columns = padding
    around = columns - limit
    # Maps that are channels_last (or of one channel or cell, so that they are both) have a fast kernel for any padding.
    if around > 0 and input.is_contiguous() and not input.is_contiguous(memory_format=torch.channels_last):
        input, columns = F.pad(input, (around, around)), limit
    return F.conv2d(input, kernel, bias, stride, (rows, columns), groups=input.shape[1])


class _DepthwiseConv(torch.autograd.Function):
    """One kernel a channel. Backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, limit: int) -> Tensor:
        return _forward(input, kernel, bias, stride, padding, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, kernel, bias, *ctx.geometry = inputs
        ctx.save_for_backward(input, kernel)
        ctx.save_for_forward(input, kernel)
        ctx.has_bias = bias is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, kernel = ctx.saved_tensors
        stride, padding, limit = ctx.geometry
        of_input = of_kernel = of_bias = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                of_input = torch.ops.aten.convolution_backward(
                    *(grad, input, kernel, None, stride, padding, [1, 1], False, [0, 0], input.shape[1]),
                    [True, False, False],
                )[0]
            if ctx.needs_input_grad[1]:
                of_kernel = _kernel_gradient(input, grad, kernel, stride, padding, limit)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = grad.sum((0, 2, 3))
        return of_input, of_kernel, of_bias, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        of_input, of_kernel, of_bias, *_ = tangents
        input, kernel = ctx.saved_tensors
        stride, padding, limit = ctx.geometry
        parts = []
        if of_input is not None:
            parts.append(_forward(of_input, kernel, None, stride, padding, limit))
        if of_kernel is not None:
            parts.append(_forward(input, of_kernel, None, stride, padding, limit))
        if of_bias is not None:
            parts.append(of_bias.reshape(-1, 1, 1))
        return functools.reduce(torch.add, parts)


def _kernel_gradient(input: Tensor, grad: Tensor, kernel: Tensor, stride: Pair, padding: Pair, limit: int) -> Tensor:
    """input (N, C, H, W), grad (N, C, H', W') -> (C, 1, R, S), summed in float32 at least."""
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    images = max(1, PART // kernel.numel())
    pairs = zip(torch.split(input, images), torch.split(grad, images), strict=True)
    parts = [_of_part(maps.to(dtype), out.to(dtype), kernel, stride, padding, limit) for maps, out in pairs]
    return functools.reduce(torch.add, parts).to(kernel.dtype)


def _of_part(maps: Tensor, grad: Tensor, kernel: Tensor, stride: Pair, padding: Pair, limit: int) -> Tensor:
    """Every map (1, N*C, H, W) is convolved with its own window (N*C, 1, H', W'), the gradient of its output.

    A step of the convolution is a distance between cells of that window. Cells to which the last step did not reach
    would follow after R x S. What padding the fast kernel does not take, is put around.
    """
    count, channels = grad.shape[:2]
    extents = [step * (side - 1) + 1 for step, side in zip(stride, grad.shape[-2:], strict=True)]
    inner = [min(cells, limit, extent - 1) for cells, extent in zip(padding, extents, strict=True)]
    rows, columns = (cells - kept for cells, kept in zip(padding, inner, strict=True))
    if rows or columns:
        maps = F.pad(maps, (columns, columns, rows, rows))
    found = F.conv2d(
        maps.contiguous().reshape(1, count * channels, *maps.shape[-2:]),
        grad.contiguous().reshape(count * channels, 1, *grad.shape[-2:]),
        padding=inner,
        dilation=stride,
        groups=count * channels,
    )
    height, width = kernel.shape[-2:]
    return found[0, :, :height, :width].reshape(count, channels, 1, height, width).sum(0)
