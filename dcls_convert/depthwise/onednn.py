"""Depthwise convolution on x86 CPUs: torch's oneDNN, made to take its fast kernels.

ONEDNN_VERBOSE=1 (torch 2.15, oneDNN 3.13) shows the slow `gemm:jit` for contiguous maps with more padding on the left
than MOST_COLUMNS, so surplus columns are put around the map before; and for nearly all gradients of the weight, so that
each is computed as a depthwise convolution too: of every map with the gradient of its output as the window.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from .geometry import Pair

MOST_COLUMNS = {
    "AVX512": 6,
    "AVX2": 4,
}  # of padding; on other processors nothing has been measured, or changes
# oneDNN convolves these; no other was faster in this way.
DTYPES = frozenset({torch.float32, torch.bfloat16})
FEWEST_CELLS = (
    49  # in windows whose gradient is convolved; smaller ones may lose on channels_last maps
)
PART = 2**22  # numbers held at once in the per-image gradients of a window


# torch.compile cannot trace the question (its answer is no tensor), and looks through a cache around it.
@assume_constant_result  # type: ignore[untyped-decorator]
def most_columns() -> int | None:
    """Columns of padding that the fast kernel of this processor takes; None where it is not known."""
    return MOST_COLUMNS.get(torch.backends.cpu.get_cpu_capability())


def depthwise(
    input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    """input (N, C, H, W), kernel (O, 1, R, S), O a multiple of C, as `F.conv2d` with C groups."""
    pays = kernel.shape[0] == input.shape[1] and kernel.shape[-2] * kernel.shape[-1] >= FEWEST_CELLS
    # Under autocast, F.conv2d casts its arguments, and autograd must see the casts.
    if (
        pays
        and torch.is_grad_enabled()
        and kernel.requires_grad
        and not torch.is_autocast_enabled("cpu")
    ):
        return cast(Tensor, _Depthwise.apply(input, kernel, bias, stride, padding))
    return _forward(input, kernel, bias, stride, padding)


def _forward(
    input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    around = padding[1] - cast(int, most_columns())
    # channels_last maps (also maps of one channel or one cell, which are in both formats) are fast with any padding.
    if (
        around > 0
        and input.is_contiguous()
        and not input.is_contiguous(memory_format=torch.channels_last)
    ):
        input, padding = F.pad(input, (around, around)), (padding[0], padding[1] - around)
    return F.conv2d(input, kernel, bias, stride, padding, groups=input.shape[1])


class _Depthwise(torch.autograd.Function):
    """One kernel a channel. Backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        ctx.geometry, ctx.has_bias = (stride, padding), bias is not None
        ctx.save_for_backward(input, kernel)
        return _forward(input, kernel, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, kernel = ctx.saved_tensors
        stride, padding = ctx.geometry
        of_input = of_kernel = of_bias = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                of_input = torch.ops.aten.convolution_backward(
                    *(
                        grad,
                        input,
                        kernel,
                        None,
                        stride,
                        padding,
                        [1, 1],
                        False,
                        [0, 0],
                        input.shape[1],
                    ),
                    [True, False, False],
                )[0]
            if ctx.needs_input_grad[1]:
                of_kernel = _kernel_gradient(input, grad, kernel, stride, padding)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                of_bias = grad.sum((0, 2, 3))
        return of_input, of_kernel, of_bias, None, None


def _kernel_gradient(
    input: Tensor, grad: Tensor, kernel: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """input (N, C, H, W), grad (N, C, H', W') -> (C, 1, R, S), summed in float32 at least; stride becomes dilation."""
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    extents = [step * (side - 1) + 1 for step, side in zip(stride, grad.shape[2:], strict=True)]
    most = cast(int, most_columns())
    inner = [min(cells, most, extent - 1) for cells, extent in zip(padding, extents, strict=True)]
    rows, columns = (cells - kept for cells, kept in zip(padding, inner, strict=True))
    height, width = kernel.shape[2:]
    total: Tensor | float = 0.0
    images = max(1, PART // kernel.numel())
    for maps, out in zip(torch.split(input, images), torch.split(grad, images), strict=True):
        if rows or columns:
            maps = F.pad(maps, (columns, columns, rows, rows))
        count = out.shape[0] * out.shape[1]
        planes = maps.to(dtype).contiguous().reshape(1, count, *maps.shape[2:])
        windows = out.to(dtype).contiguous().reshape(count, 1, *out.shape[2:])
        of_each = F.conv2d(planes, windows, padding=inner, dilation=stride, groups=count)
        # Cut: the stride may have left cells at the end of a map unread.
        total = total + of_each[0, :, :height, :width].reshape(-1, *kernel.shape).sum(0)
    return cast(Tensor, total).to(kernel.dtype)
