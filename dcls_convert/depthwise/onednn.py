"""Depthwise convolution on x86 CPUs, arranged so that torch's oneDNN uses its fast kernels.

ONEDNN_VERBOSE=1 (torch 2.15, oneDNN 3.13) shows two cases in which oneDNN uses its slow `gemm:jit`:
contiguous feature maps with more padding on the left than MAX_PADDING_COLUMNS, and nearly all
gradients of the weight. In the first case, the surplus columns are added to the map beforehand. In
the second, the gradient of the weight is computed as a depthwise convolution too: every map is
convolved with the gradient of its output as the window.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..geometry import Pair

# Columns of padding, by CPU capability. With other capabilities, padding changes nothing, or was
# not measured.
MAX_PADDING_COLUMNS = {"AVX512": 6, "AVX2": 4}
# The dtypes that are convolved in this way; no other dtype became faster.
DTYPES = frozenset({torch.float32, torch.bfloat16})
# Cells of the smallest window whose gradient is computed as a convolution. Smaller ones may become
# slower on channels_last maps.
MIN_GRADIENT_CELLS = 49
MAX_GRADIENT_FLOATS = 2**22  # numbers in memory at once, for one weight gradient per image


# torch.compile cannot trace `get_cpu_capability`, which returns a string, and it ignores caches.
@assume_constant_result  # type: ignore[untyped-decorator]
def max_padding_columns() -> int | None:
    """Return how many columns of padding this processor's fast kernel allows; None if unknown."""
    return MAX_PADDING_COLUMNS.get(torch.backends.cpu.get_cpu_capability())


def depthwise_by_onednn(
    input: Tensor,
    bias: Tensor | None,
    kernel: Tensor,
    *,
    dtype: torch.dtype,
    stride: Pair,
    padding: Pair,
) -> Tensor:
    """Compute `F.conv2d` with C groups: input (N, C, H, W), kernel (O, 1, R, S), O a multiple of C.

    Input, bias and kernel are cast to the dtype first, as autocast does.
    """
    input = input.to(dtype)
    kernel = kernel.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
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
    # channels_last maps are fast with any padding. Maps of one channel or one cell are both
    # contiguous and channels_last.
    if (
        surplus > 0
        and input.is_contiguous()
        and not input.is_contiguous(memory_format=torch.channels_last)
    ):
        input = F.pad(input, (surplus, surplus))
        padding = (padding[0], padding[1] - surplus)
    return F.conv2d(input, kernel, bias, stride, padding, groups=input.shape[1])


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution with one kernel per channel.

    Backward consists of differentiable operations, so that there are gradients of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor:
        ctx.stride = stride
        ctx.padding = padding
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
            if ctx.needs_input_grad[2]:
                grad_bias = grad_output.sum((0, 2, 3))
        return grad_input, grad_weight, grad_bias, None, None


def _input_gradient(
    input: Tensor, grad_output: Tensor, kernel: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """Compute the input's gradient: grad_output (N, C, H', W') -> (N, C, H, W)."""
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        kernel,
        None,  # bias sizes
        stride,
        padding,
        [1, 1],  # dilation
        False,  # not transposed
        [0, 0],  # output padding
        input.shape[1],  # groups
        [True, False, False],  # only the input's gradient
    )
    return cast(Tensor, gradients[0])


def _weight_gradient(
    input: Tensor, grad_output: Tensor, kernel: Tensor, stride: Pair, padding: Pair
) -> Tensor:
    """Compute the kernel's gradient: (N, C, H, W), grad_output (N, C, H', W') -> (C, 1, R, S).

    Every map is convolved with the gradient of its output as the window, and the stride as the
    dilation. Sums are in float32 at least.
    """
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    max_columns = cast(int, max_padding_columns())
    conv_padding = []  # passed to F.conv2d, for each axis
    added_padding = []  # added by F.pad beforehand, for each axis
    for cells, step, side in zip(padding, stride, grad_output.shape[2:], strict=True):
        extent = step * (side - 1) + 1
        cells_by_conv = min(cells, max_columns, extent - 1)
        conv_padding.append(cells_by_conv)
        added_padding.append(cells - cells_by_conv)
    height, width = kernel.shape[2:]
    total: Tensor | float = 0.0
    images = max(1, MAX_GRADIENT_FLOATS // kernel.numel())
    for maps, grads in zip(
        torch.split(input, images), torch.split(grad_output, images), strict=True
    ):
        if any(added_padding):
            rows, columns = added_padding
            maps = F.pad(maps, (columns, columns, rows, rows))
        count = grads.shape[0] * grads.shape[1]
        planes = maps.to(dtype).contiguous().reshape(1, count, *maps.shape[2:])
        windows = grads.to(dtype).contiguous().reshape(count, 1, *grads.shape[2:])
        gradients = F.conv2d(planes, windows, padding=conv_padding, dilation=stride, groups=count)
        # If the stride left cells at the end of a map unread, the result is too large.
        gradients = gradients[0, :, :height, :width]
        total = total + gradients.reshape(-1, *kernel.shape).sum(0)
    return cast(Tensor, total).to(kernel.dtype)
