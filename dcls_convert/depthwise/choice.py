"""Depthwise convolution of two axes in the fastest way known: same outputs and gradients as torch's, sooner.

Axes: N batch, C channels, H x W a map, R x S the window.

On GPUs, torch's own way or `depthwise_triton`. On CPUs, torch's oneDNN, made to take its fast kernels:

Measured with ONEDNN_VERBOSE=1 (torch 2.15, oneDNN 3.13): oneDNN takes its fast kernel `jit_dw` for contiguous maps only
if the padding on the left is at most 6 columns (4 with AVX2 alone) and less than the window's width; else it takes the
slow `gemm:jit`. A window of 17 columns needs 8. So the surplus columns are put around the map beforehand.
The gradient of the weight is always computed by `gemm:jit`, but for narrow windows on channels_last maps. That gradient
is itself a depthwise convolution, of every map with the gradient of its output as the window, and so `jit_dw` serves.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .eager import is_compiled, is_eager
from .geometry import Padding
from .measured import allows_tf32, measurements, preference, runs_triton, triton_is_faster
from .triton import depthwise, is_channels_last

MOST_COLUMNS = {"AVX512": 6, "AVX2": 4}  # of padding; on other processors nothing has been measured, or changes
DTYPES = frozenset({torch.float32, torch.bfloat16})  # oneDNN convolves these; no other was faster in this way
FEWEST_CELLS = 49  # in windows whose gradient is convolved; smaller ones may lose on channels_last maps
PART = 2**22  # numbers held at once in the per-image gradients of a window
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_WINDOW = 51  # cells of a side; Triton's kernel was not tested with larger ones

Pair = tuple[int, int]
Way = Literal["torch", "onednn", "triton"]


def conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d`, with the same values, memory format and gradients of any order.

    Depthwise convolutions go the way that `depthwise_way` says, but not under torch.func's transforms, nor in exported
    and traced programs, which hold torch's convolution; on CPUs also in compiled ones, where the compiler chooses.
    """
    tensors = [input, kernel] if bias is None else [input, kernel, bias]
    eager = is_eager(*tensors)
    if input.dim() == 4 and (eager or (is_compiled(*tensors) and runs_triton(input.device))):
        dtype, cells = _computed_dtype(tensors), _cells(padding, kernel.shape)
        geometry = (input.shape, kernel.shape, stride, padding, dilation, groups)
        way = depthwise_way(input.device, dtype, is_channels_last(input), *geometry)
        if way == "triton" and cells:
            # What autocast does; torch.library.register_autocast knows one dtype, whichever was asked for.
            input, kernel, *rest = (tensor.to(dtype) for tensor in tensors)
            return cast(Tensor, depthwise(input, kernel, rest[0] if rest else None, cells))
        if way == "onednn" and eager and cells and input.dtype == kernel.dtype:
            return _by_onednn(input, kernel, bias, (stride[0], stride[1]), cells)
    return F.conv2d(input, kernel, bias, cast(Any, stride), cast(Any, padding), cast(Any, dilation), groups)


def depthwise_way(
    device: torch.device,
    dtype: torch.dtype | None,
    channels_last: bool,
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Way:
    """The way that `conv2d` takes for input_size (N, C, H, W) and kernel_size (O, C / groups, R, S).

    "triton" only where it was measured to be faster on this GPU; "onednn" on x86 CPUs; "torch" everywhere else, where a
    convolution is not depthwise, and where it would fail. DCLS_CONVERT_DEPTHWISE=torch overrules, and so does =triton
    where Triton's kernel can compute it.

    Args:
        dtype: In which it is computed: autocast's where that is on; None where tensors differ.

    Raises:
        DclsConvertError: The environment variable is set to something else.
    """
    preferred = preference()
    is_depthwise = kernel_size[1] == 1 and groups == input_size[1] and tuple(dilation) == (1, 1)
    if preferred == "torch" or not is_depthwise or not all(input_size) or dtype is None:
        return "torch"
    cells, window = _cells(padding, kernel_size), kernel_size[2:]
    one_each = kernel_size[0] == groups and tuple(stride) == (1, 1)
    if cells and one_each and max(window) <= LARGEST_WINDOW and _computes(device, dtype):
        rows, columns = (input_size[axis + 2] + 2 * cells[axis] - window[axis] + 1 for axis in range(2))
        size = (window[0] * window[1], rows * columns, input_size[0])
        faster = preferred == "triton" or triton_is_faster(measurements(device, dtype, channels_last), *size)
        if faster and rows > 0 and columns > 0:
            return "triton"
    if device.type == "cpu" and dtype in DTYPES and not isinstance(padding, str) and _most_columns() is not None:
        return "onednn"
    return "torch"


def _cells(padding: Padding, kernel_size: Sequence[int]) -> Pair | None:
    """Padding as cells on either side of rows and columns; None for 'same' with an even window, which is uneven."""
    if padding == "valid":
        return (0, 0)
    if padding == "same":
        rows, columns = kernel_size[2:]
        return (rows // 2, columns // 2) if rows % 2 and columns % 2 else None
    return cast(Pair, tuple(padding))


def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernel does, with the precision that was asked for."""
    exact = dtype == torch.float32 and device.type == "cuda" and not allows_tf32()
    return dtype in TRITON_DTYPES and not exact and runs_triton(device)


def _computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which torch would convolve these; None where they differ."""
    device, dtypes = tensors[0].device.type, {tensor.dtype for tensor in tensors}
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    return tensors[0].dtype if len(dtypes) == 1 else None


@functools.cache
def _most_columns() -> int | None:
    return MOST_COLUMNS.get(torch.backends.cpu.get_cpu_capability())


def _convolves_gradient(input: Tensor, kernel: Tensor) -> bool:
    pays = kernel.shape[0] == input.shape[1] and kernel.shape[-2] * kernel.shape[-1] >= FEWEST_CELLS
    # Under autocast, F.conv2d casts its arguments, and autograd must see the casts.
    return pays and torch.is_grad_enabled() and kernel.requires_grad and not torch.is_autocast_enabled("cpu")


def _by_onednn(input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    limit = cast(int, _most_columns())
    if _convolves_gradient(input, kernel):
        return cast(Tensor, _DepthwiseConv.apply(input, kernel, bias, stride, padding, limit))
    return _forward(input, kernel, bias, stride, padding, limit)


def _forward(input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, limit: int) -> Tensor:
    rows, columns = padding
    around = columns - limit
    # channels_last maps (also maps of one channel or one cell, which are in both formats) are fast with any padding.
    if around > 0 and input.is_contiguous() and not input.is_contiguous(memory_format=torch.channels_last):
        input, columns = F.pad(input, (around, around)), limit
    return F.conv2d(input, kernel, bias, stride, (rows, columns), groups=input.shape[1])


class _DepthwiseConv(torch.autograd.Function):
    """One kernel a channel. Backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, limit: int
    ) -> Tensor:
        ctx.geometry, ctx.has_bias = (stride, padding, limit), bias is not None
        ctx.save_for_backward(input, kernel)
        return _forward(input, kernel, bias, stride, padding, limit)

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


def _kernel_gradient(input: Tensor, grad: Tensor, kernel: Tensor, stride: Pair, padding: Pair, limit: int) -> Tensor:
    """input (N, C, H, W), grad (N, C, H', W') -> (C, 1, R, S), summed in float32 at least."""
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    images = max(1, PART // kernel.numel())
    pairs = zip(torch.split(input, images), torch.split(grad, images), strict=True)
    parts = [_of_part(maps.to(dtype), out.to(dtype), kernel, stride, padding, limit) for maps, out in pairs]
    return functools.reduce(torch.add, parts).to(kernel.dtype)


def _of_part(maps: Tensor, grad: Tensor, kernel: Tensor, stride: Pair, padding: Pair, limit: int) -> Tensor:
    """Every map (1, N*C, H, W) is convolved with a window of its own, (N*C, 1, H', W'): the gradient of its output.

    The old convolution's stride is the new one's dilation. Where the old stride left cells at the end of a map unread,
    the result is larger than R x S and cut. Padding that the fast kernel does not take is put around the map.
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
