"""Depthwise convolution of wide windows as batched matrix products, on any device on which torch multiplies matrices.

Axes: N images, C channels, H x W a map, R x S the window, T x U outputs in a patch, A x B the inputs that a patch sees.

A patch's outputs are its inputs times the bank (T * U, A * B), whose row of the output (t, u) is the window shifted by
(t, u). Stride and dilation are 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .eager import is_channels_last
from .geometry import ceil_div

# Outputs of a patch along an axis. Larger patches read fewer inputs twice, but multiply by more zeros: on paper, 14 is
# best for windows of 17 on maps of 14 to 56. It does not depend on the batch: all batches are computed alike.
MOST_SIDE = 14
# Of patches and banks at once; the channels are taken in parts where all would need more.
MOST_BYTES = 512 * 2**20


class _Axis(NamedTuple):
    """How patches lie along one axis of the map; in cells, but for `patches`."""

    taps: int
    outputs: int
    patches: int
    side: int  # outputs of a patch
    seen: int  # inputs that a patch sees
    before: int  # padding to put before the map, and after; negative cells are cut off the map
    after: int
    hidden: int  # padding before the map that is left out, of patches and bank alike


def _axis(inputs: int, taps: int, padding: int) -> _Axis:
    # A number under torch.compile, too: with symbols for sizes it takes minutes.
    inputs = len(range(inputs))
    outputs = inputs + 2 * padding - taps + 1
    patches = ceil_div(outputs, MOST_SIDE)
    side = ceil_div(outputs, patches)
    seen, hidden = side + taps - 1, 0
    if patches == 1:  # the only patch sees the map, and no padding
        seen, hidden = inputs + 2 * min(padding, 0), max(padding, 0)
    before = padding - hidden
    after = (patches - 1) * side + seen - inputs - before
    return _Axis(taps, outputs, patches, side, seen, before, after, hidden)


def _channels_at_once(maps: Tensor, channels: int, rows: _Axis, columns: _Axis) -> int:
    """As many as patches and banks of MOST_BYTES allow; one at least."""
    patches = maps.shape[0] * rows.patches * columns.patches
    inputs, outputs = rows.seen * columns.seen, rows.side * columns.side
    bytes_each = (patches * (inputs + outputs) + inputs * outputs) * maps.element_size()
    # Asked first: torch.compile need not know the size of the batch for it.
    return channels if channels * bytes_each <= MOST_BYTES else max(1, MOST_BYTES // bytes_each)


def _pad(tensor: Tensor, cells: tuple[int, ...]) -> Tensor:
    return F.pad(tensor, cells) if any(cells) else tensor  # F.pad copies in any case


def _seen_by_patches(maps: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
    """(N, C, H, W), contiguous -> (C, N * patches, A * B)."""
    maps = _pad(maps, (columns.before, columns.after, rows.before, rows.after))
    patches = maps.unfold(2, rows.seen, rows.side).unfold(3, columns.seen, columns.side)
    return patches.transpose(0, 1).reshape(maps.shape[1], -1, rows.seen * columns.seen)


def _bank(kernel: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
    """(C, 1, R, S) -> (C, T * U, A * B)."""
    left, top = (axis.side - 1 - axis.hidden for axis in (columns, rows))
    right, bottom = (axis.seen + axis.hidden - axis.taps for axis in (columns, rows))
    shifted = (
        _pad(kernel[:, 0], (left, right, top, bottom))
        .unfold(1, rows.seen, 1)
        .unfold(2, columns.seen, 1)
    )
    # The first view holds the window shifted the most.
    return shifted.flip(1, 2).reshape(kernel.shape[0], rows.side * columns.side, -1)


def convolve(input: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
    """(N, C, H, W), (C, 1, R, S) -> (N, C, H', W') in the input's memory format."""
    rows, columns = map(_axis, input.shape[2:], kernel.shape[2:], padding)
    maps = input.contiguous()  # channels_last maps are transposed once, not patch by patch
    images, channels, last = input.shape[0], kernel.shape[0], is_channels_last(input)
    step = _channels_at_once(maps, channels, rows, columns)
    products = [
        torch.bmm(_seen_by_patches(part, rows, columns), _bank(windows, rows, columns).mT)
        for part, windows in zip(torch.split(maps, step, 1), torch.split(kernel, step), strict=True)
    ]
    outputs = torch.cat(products) if len(products) > 1 else products[0]
    outputs = outputs.view(channels, images, rows.patches, columns.patches, rows.side, columns.side)
    height, width, format = (
        rows.patches * rows.side,
        columns.patches * columns.side,
        torch.contiguous_format,
    )
    if last:
        outputs = (
            outputs.permute(1, 2, 4, 3, 5, 0)
            .reshape(images, height, width, channels)
            .permute(0, 3, 1, 2)
        )
        format = torch.channels_last
    else:
        outputs = outputs.permute(1, 0, 2, 4, 3, 5).reshape(images, channels, height, width)
    return (
        outputs.narrow(2, 0, rows.outputs)
        .narrow(3, 0, columns.outputs)
        .contiguous(memory_format=format)
    )


def input_gradient(grad: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
    """Of the output, (N, C, H', W') -> of the input, (N, C, H, W)."""
    opposite = [taps - 1 - cells for taps, cells in zip(kernel.shape[2:], padding, strict=True)]
    return convolve(grad, kernel.flip(2, 3), opposite)


def kernel_gradient(
    input: Tensor, grad: Tensor, window: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """(N, C, H, W) and the gradient of the outputs, (N, C, H', W') -> (C, 1, R, S)."""
    rows, columns = map(_axis, input.shape[2:], window, padding)
    maps = input.contiguous()
    below, right = (axis.patches * axis.side - axis.outputs for axis in (rows, columns))
    grad = _pad(grad.contiguous(), (0, right, 0, below))
    sums = []
    step = _channels_at_once(maps, maps.shape[1], rows, columns)
    for part, of_part in zip(torch.split(maps, step, 1), torch.split(grad, step, 1), strict=True):
        patches = of_part.unfold(2, rows.side, rows.side).unfold(3, columns.side, columns.side)
        patches = patches.transpose(0, 1).reshape(patches.shape[1], -1, rows.side * columns.side)
        banks = torch.bmm(patches.mT, _seen_by_patches(part, rows, columns))
        banks = banks.view(-1, rows.side, columns.side, rows.seen, columns.seen)
        of_rows = _sum_diagonals(banks.transpose(1, 2), columns)  # (C, T, A, S)
        sums.append(_sum_diagonals(of_rows.transpose(2, 3), rows).mT)
    return torch.cat(sums).unsqueeze(1).to(input.dtype)


def _sum_diagonals(banks: Tensor, axis: _Axis) -> Tensor:
    """(C, side, ..., seen) -> (C, ..., taps): tap r is the sum of all entries whose input is r after their output."""
    banks = _pad(banks, (axis.hidden, axis.side + axis.taps - 1 - axis.seen - axis.hidden))
    diagonals = banks.unfold(-1, axis.taps, 1).diagonal(0, 1, -2)
    return diagonals.sum(-1, dtype=torch.promote_types(banks.dtype, torch.float32))


class _Depthwise(torch.autograd.Function):
    """Backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, kernel: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(input, kernel)
        with torch.autocast(input.device.type, enabled=False):
            return convolve(input, kernel, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, kernel = ctx.saved_tensors
        of_input = of_kernel = None
        with torch.autocast(input.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_input = input_gradient(grad, kernel, ctx.padding)
            if ctx.needs_input_grad[1]:
                of_kernel = kernel_gradient(input, grad, kernel.shape[2:], ctx.padding)
        return of_input, of_kernel, None


def depthwise(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W') in the input's memory format; stride 1."""
    output = cast(Tensor, _Depthwise.apply(input, kernel, padding))
    return output if bias is None else output + bias[:, None, None]
