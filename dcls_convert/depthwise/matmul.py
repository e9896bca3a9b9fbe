"""Depthwise convolution of wide windows as batched matrix products, in plain torch.

Axes: N images, C channels, H x W a map, R x S the window, T x U outputs in a patch, A x B the
inputs that a patch sees.

The outputs of a patch are its inputs times the bank, a matrix (T * U, A * B) of which each row
holds the window, shifted to one output (t, u). Stride and dilation are 1. Where a map is cut into
several patches, zeros fill the rows of both up to a multiple of ALIGNED.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .eager import is_channels_last
from .geometry import Pair, ceil_div

# Outputs of a patch along an axis. Larger patches read fewer inputs twice, but multiply by more
# zeros: by counts of operations, 14 is best for windows of 17 on maps of 14 to 56.
MAX_PATCH_SIDE = 14
# Numbers: GPUs multiply rows of whole 16 bytes up to three times as fast. Patches of 16 x 16
# outputs need no zeros, but by counts of operations they are slower for ConvNeXt-T at 224 pixels:
# they have more cells than the map.
ALIGNED = 8
# Of patches and banks at once; if all channels need more, they are taken in parts.
MAX_BYTES = 512 * 2**20
# Patches that a product takes, by the device's type; more give wrong sums on M1 and M2.
MAX_PATCHES = {"mps": 32_767}


class Axis(NamedTuple):
    """How patches lie along one axis of the map; in cells, except for `patches`."""

    taps: int
    outputs: int
    patches: int
    side: int  # outputs of a patch
    seen: int  # inputs that a patch sees
    before: int  # padding to put before the map; if negative, cells are cut off the map
    after: int
    hidden: int  # padding before the map that neither patches nor the bank have


def _axis(inputs: int, taps: int, padding: int) -> Axis:
    # Under torch.compile, too, this makes a number of it: with symbols for sizes, compiling takes
    # minutes.
    inputs = len(range(inputs))
    outputs = inputs + 2 * padding - taps + 1
    patches = ceil_div(outputs, MAX_PATCH_SIDE)
    side = ceil_div(outputs, patches)
    seen = side + taps - 1
    hidden = 0
    if patches == 1:  # the only patch sees the map, and no padding
        seen = inputs + 2 * min(padding, 0)
        hidden = max(padding, 0)
    before = padding - hidden
    after = (patches - 1) * side + seen - inputs - before
    return Axis(taps, outputs, patches, side, seen, before, after, hidden)


def row_length(cells: int, rows: Axis, columns: Axis) -> int:
    """Numbers in the row of a product that has so many cells of a patch."""
    if rows.patches == columns.patches == 1:
        return cells  # rows are views of the maps, which filling would copy
    return ceil_div(cells, ALIGNED) * ALIGNED


def patches_of(
    map_size: Sequence[int], window: Sequence[int], padding: Sequence[int]
) -> tuple[Axis, Axis]:
    """How patches lie along rows and columns; all arguments are of rows and columns too."""
    rows = _axis(map_size[0], window[0], padding[0])
    columns = _axis(map_size[1], window[1], padding[1])
    return rows, columns


def _parts_of_channels(maps: Tensor, rows: Axis, columns: Axis) -> int:
    """As few as patches and banks of MAX_BYTES in each allow; at most one for each channel."""
    channels = maps.shape[1]
    patches = maps.shape[0] * rows.patches * columns.patches
    inputs = row_length(rows.seen * columns.seen, rows, columns)
    outputs = row_length(rows.side * columns.side, rows, columns)
    bytes_each = (patches * (inputs + outputs) + inputs * outputs) * maps.element_size()
    # Asked first, so that torch.compile need not know the size of the batch.
    if channels * bytes_each <= MAX_BYTES:
        return 1
    return ceil_div(channels, max(1, MAX_BYTES // bytes_each))


def _images_at_once(maps: Tensor, rows: Axis, columns: Axis) -> int | None:
    """As many as MAX_PATCHES allow, one at least; None if the device has no bound."""
    most = MAX_PATCHES.get(maps.device.type)
    if most is None:
        return None
    return max(1, most // (rows.patches * columns.patches))


def _padded(tensor: Tensor, cells: tuple[int, ...]) -> Tensor:
    if not any(cells):
        return tensor  # F.pad would copy it
    return F.pad(tensor, cells)


def _seen_by_patches(maps: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """(N, C, H, W), contiguous -> (C, N * patches, row of A * B)."""
    maps = _padded(maps, (columns.before, columns.after, rows.before, rows.after))
    return _cut(maps, (rows.seen, columns.seen), rows, columns)


def _cut(maps: Tensor, size: Pair, rows: Axis, columns: Axis) -> Tensor:
    """(N, C, ., .) -> (C, N * patches, row), each row a patch of this size."""
    patches = maps.unfold(2, size[0], rows.side).unfold(3, size[1], columns.side).transpose(0, 1)
    cells = size[0] * size[1]
    length = row_length(cells, rows, columns)
    if length == cells:
        return patches.reshape(maps.shape[1], -1, cells)
    filled = maps.new_empty(maps.shape[1], math.prod(patches.shape[1:4]), length)
    filled.narrow(2, 0, cells).view(patches.shape).copy_(patches)
    filled.narrow(2, cells, length - cells).zero_()
    return filled


def _bank(kernel: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """(C, 1, R, S) -> (C, rows of T * U, row of A * B)."""
    left = columns.side - 1 - columns.hidden
    right = columns.seen + columns.hidden - columns.taps
    top = rows.side - 1 - rows.hidden
    bottom = rows.seen + rows.hidden - rows.taps
    windows = _padded(kernel[:, 0], (left, right, top, bottom))
    # Cells are numbered, and then gathered by number: a flipped view of the windows themselves
    # would be copied twice.
    cells = torch.arange(windows[0].numel(), device=kernel.device).view(windows.shape[1:])
    shifted = cells.unfold(0, rows.seen, 1).unfold(1, columns.seen, 1)
    # The first view holds the window that is shifted the most.
    index = shifted.flip(0, 1).reshape(rows.side * columns.side, -1)
    height = row_length(index.shape[0], rows, columns)
    width = row_length(index.shape[1], rows, columns)
    # What is added takes cell 0: with several patches, the zero in the corner of the padded window.
    index = F.pad(index, (0, width - index.shape[1], 0, height - index.shape[0]))
    return windows.flatten(1).index_select(1, index.flatten()).view(-1, height, width)


def convolve(
    maps: Tensor, kernel: Tensor, padding: Sequence[int], *, channels_last: bool = False
) -> Tensor:
    """(N, C, H, W), (C, 1, R, S) -> (N, C, H', W'), contiguous or channels_last.

    Maps are best contiguous, or else they are transposed patch by patch.
    """
    rows, columns = patches_of(maps.shape[2:], kernel.shape[2:], padding)
    images = _images_at_once(maps, rows, columns)
    if images is not None and maps.shape[0] > images:
        parts = [
            convolve(part, kernel, padding, channels_last=channels_last)
            for part in torch.split(maps, images)
        ]
        return torch.cat(parts)
    count = _parts_of_channels(maps, rows, columns)
    products = []
    for part, windows in zip(maps.tensor_split(count, 1), kernel.tensor_split(count), strict=True):
        patches = _seen_by_patches(part, rows, columns)
        products.append(torch.bmm(patches, _bank(windows, rows, columns).mT))
    outputs = torch.cat(products) if len(products) > 1 else products[0]
    return _as_maps(outputs, rows, columns, channels_last=channels_last)


def _as_maps(outputs: Tensor, rows: Axis, columns: Axis, *, channels_last: bool) -> Tensor:
    """(C, N * patches, row of T * U) -> (N, C, H', W')."""
    channels = outputs.shape[0]
    height = rows.patches * rows.side
    width = columns.patches * columns.side
    outputs = outputs.narrow(2, 0, rows.side * columns.side).view(
        channels, -1, rows.patches, columns.patches, rows.side, columns.side
    )  # (C, N, patches, patches, T, U)
    images = outputs.shape[1]
    if channels_last:
        maps = outputs.permute(1, 2, 4, 3, 5, 0).reshape(images, height, width, channels)
        maps = maps.permute(0, 3, 1, 2)
        memory_format = torch.channels_last
    else:
        maps = outputs.permute(1, 0, 2, 4, 3, 5).reshape(images, channels, height, width)
        memory_format = torch.contiguous_format
    maps = maps.narrow(2, 0, rows.outputs).narrow(3, 0, columns.outputs)
    return maps.contiguous(memory_format=memory_format)


def kernel_gradient(
    maps: Tensor, grad: Tensor, window: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """(N, C, H, W) and the gradient of the outputs, (N, C, H', W') -> (C, 1, R, S)."""
    rows, columns = patches_of(maps.shape[2:], window, padding)
    images = _images_at_once(maps, rows, columns)
    if images is not None and maps.shape[0] > images:
        total: Tensor | float = 0.0
        for part, grad_of_part in zip(
            torch.split(maps, images), torch.split(grad, images), strict=True
        ):
            total = total + kernel_gradient(part, grad_of_part, window, padding)
        return cast(Tensor, total)
    below = rows.patches * rows.side - rows.outputs
    right = columns.patches * columns.side - columns.outputs
    grad = _padded(grad, (0, right, 0, below))
    sums = []
    count = _parts_of_channels(maps, rows, columns)
    for part, grad_of_part in zip(
        maps.tensor_split(count, 1), grad.tensor_split(count, 1), strict=True
    ):
        of_outputs = _cut(grad_of_part, (rows.side, columns.side), rows, columns)
        banks = torch.bmm(of_outputs.mT, _seen_by_patches(part, rows, columns))
        banks = banks.narrow(1, 0, rows.side * columns.side)
        banks = banks.narrow(2, 0, rows.seen * columns.seen)
        banks = banks.view(-1, rows.side, columns.side, rows.seen, columns.seen)
        of_rows = _sum_diagonals(banks.transpose(1, 2), columns)  # (C, T, A, S)
        sums.append(_sum_diagonals(of_rows.transpose(2, 3), rows).mT)
    return torch.cat(sums).unsqueeze(1).to(maps.dtype)


def _sum_diagonals(banks: Tensor, axis: Axis) -> Tensor:
    """(C, side, ..., seen) -> (C, ..., taps).

    Tap r is the sum of all entries whose input is r cells after their output.
    """
    after = axis.side + axis.taps - 1 - axis.seen - axis.hidden
    banks = _padded(banks, (axis.hidden, after))
    diagonals = banks.unfold(-1, axis.taps, 1).diagonal(0, 1, -2)
    return diagonals.sum(-1, dtype=torch.promote_types(banks.dtype, torch.float32))


class _Depthwise(torch.autograd.Function):
    """Backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, kernel: Tensor, padding: tuple[int, int], channels_last: bool
    ) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(maps, kernel)
        with torch.autocast(maps.device.type, enabled=False):
            return convolve(maps, kernel, padding, channels_last=channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, kernel = ctx.saved_tensors
        window = kernel.shape[2:]
        channels_last = is_channels_last(grad)
        grad = grad.contiguous()  # transposed once, for both gradients
        of_maps = None
        of_kernel = None
        with torch.autocast(maps.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                rest = [size - 1 - pad for size, pad in zip(window, ctx.padding, strict=True)]
                of_maps = convolve(grad, kernel.flip(2, 3), rest, channels_last=channels_last)
            if ctx.needs_input_grad[1]:
                of_kernel = kernel_gradient(maps, grad, window, ctx.padding)
        return of_maps, of_kernel, None, None


def depthwise(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W'); the stride is 1.

    The output is in the input's memory format and the kernel's dtype.
    """
    # Cast and transposed in one copy, which the backward pass has too.
    maps = input.to(kernel.dtype, memory_format=torch.contiguous_format)
    output = cast(Tensor, _Depthwise.apply(maps, kernel, padding, is_channels_last(input)))
    if bias is None:
        return output
    return output + bias[:, None, None]
