"""Depthwise convolution on x86 CPUs: torch's oneDNN, made to take its fast kernels.

ONEDNN_VERBOSE=1 (torch 2.15, oneDNN 3.13) shows two cases in which oneDNN takes its slow
`gemm:jit`: contiguous feature maps with more padding on the left than MAX_PADDING_COLUMNS, and
nearly all gradients of the weight. So the surplus columns are put around the map before, and the
gradient of the weight is computed as a depthwise convolution too: of every map, with the gradient
of its output as the window.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..geometry import Pair

# Columns of padding. On other processors nothing has been measured, or this changes nothing.
MAX_PADDING_COLUMNS = {"AVX512": 6, "AVX2": 4}
# oneDNN convolves these; no other dtype was faster in this way.
DTYPES = frozenset({torch.float32, torch.bfloat16})
# In windows whose gradient is convolved; smaller ones may lose on channels_last maps.
MIN_GRADIENT_CELLS = 49
MAX_GRADIENT_FLOATS = 2**22  # numbers held at once: gradients of the weight, one for each image


# torch.compile cannot trace `get_cpu_capability`, which returns a string, and ignores caches.
@assume_constant_result  # type: ignore[untyped-decorator]
def max_padding_columns() -> int | None:
    """Columns of padding that the fast kernel of this processor takes; None if it is not known."""
    return MAX_PADDING_COLUMNS.get(torch.backends.cpu.get_cpu_capability())


def depthwise(
    input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    """input (N, C, H, W), kernel (O, 1, R, S), O a multiple of C, as `F.conv2d` with C groups.

    The output is in the kernel's dtype.
    """
    input = input.to(kernel.dtype)
    cells = kernel.shape[-2] * kernel.shape[-1]
    wants_weight_gradient = torch.is_grad_enabled() and kernel.requires_grad
    if (
        wants_weight_gradient
        and kernel.shape[0] == input.shape[1]
        and cells >= MIN_GRADIENT_CELLS
        # Under autocast, F.conv2d casts its arguments, and autograd must see the casts.
        and not torch.is_autocast_enabled("cpu")
    ):
        return cast(Tensor, _Depthwise.apply(input, kernel, bias, stride, padding))
    return _forward(input, kernel, bias, stride, padding)


def _forward(
    input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    surplus = padding[1] - cast(int, max_padding_columns())
    # channels_last maps are fast with any padding. Maps of one channel or one cell are in both
    # formats.
    if (
        surplus > 0
        and input.is_contiguous()
        and not input.is_contiguous(memory_format=torch.channels_last)
    ):
        input = F.pad(input, (surplus, surplus))
        padding = (padding[0], padding[1] - surplus)
    return F.conv2d(input, kernel, bias, stride, padding, groups=input.shape[1])


class _Depthwise(torch.autograd.Function):
    """One kernel a channel.

    Backward is made of differentiable operations, for gradients of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        ctx.stride = stride
        ctx.padding = padding
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input, kernel)
        return _forward(input, kernel, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, kernel = ctx.saved_tensors
        grad_input = None
        grad_weight = None
        grad_bias = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                grad_input = _input_gradient(input, grad_output, kernel, ctx.stride, ctx.padding)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_gradient(input, grad_output, kernel, ctx.stride, ctx.padding)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                grad_bias = grad_output.sum((0, 2, 3))
        return grad_input, grad_weight, grad_bias, None, None


def _input_gradient(
    input: Tensor, grad_output: Tensor, kernel: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """grad_output (N, C, H', W') -> (N, C, H, W)."""
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        kernel,
        None,  # sizes of a bias
        stride,
        padding,
        [1, 1],  # dilation
        False,  # not transposed
        [0, 0],  # padding of outputs
        input.shape[1],  # groups
        [True, False, False],  # the gradient of the input alone
    )
    return cast(Tensor, gradients[0])


def _weight_gradient(
    input: Tensor, grad_output: Tensor, kernel: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """input (N, C, H, W), grad_output (N, C, H', W') -> (C, 1, R, S), summed in float32 at least.

    A convolution of each map: its window is the gradient of the output, its dilation the stride.
    """
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    most = cast(int, max_padding_columns())
    inner = []  # padding passed to F.conv2d, on each axis
    around = []  # padding added by F.pad before, on each axis
    for cells, step, side in zip(padding, stride, grad_output.shape[2:], strict=True):
        extent = step * (side - 1) + 1
        inner.append(min(cells, most, extent - 1))
        around.append(cells - inner[-1])
    height, width = kernel.shape[2:]
    total: Tensor | float = 0.0
    images = max(1, MAX_GRADIENT_FLOATS // kernel.numel())
    for maps, grads in zip(
        torch.split(input, images), torch.split(grad_output, images), strict=True
    ):
        if any(around):
            maps = F.pad(maps, (around[1], around[1], around[0], around[0]))
        count = grads.shape[0] * grads.shape[1]
        planes = maps.to(dtype).contiguous().reshape(1, count, *maps.shape[2:])
        windows = grads.to(dtype).contiguous().reshape(count, 1, *grads.shape[2:])
        gradient_of_each = F.conv2d(planes, windows, padding=inner, dilation=stride, groups=count)
        # The stride may have left cells at the end of a map unread, which are cut off.
        total = total + gradient_of_each[0, :, :height, :width].reshape(-1, *kernel.shape).sum(0)
    return cast(Tensor, total).to(kernel.dtype)
