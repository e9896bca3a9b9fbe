"""Depthwise convolution as batched matrix products, in plain torch: for GPUs without `blocks`.

A map is cut into patches of outputs. The outputs of a patch are its inputs times the bank, whose
row (t, u) is the window, shifted to output (t, u). Along one axis, the bank of 3 cells for 2
outputs from 4 inputs is

    k0 k1 k2  0
     0 k0 k1 k2

Axes: N images, C channels, H x W a map, R x S the window, T x U the outputs of a patch, A x B the
inputs that these outputs need. Stride and dilation are 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, ceil_div
from .layouts import is_channels_last

# Outputs of a patch along an axis. By counts of operations, 14 is best for windows of 17.
MAX_PATCH_SIDE = 14


def depthwise_by_products(
    input: Tensor, bias: Tensor | None, kernel: Tensor, *, dtype: torch.dtype, padding: Pair
) -> Tensor:
    """Convolve: input (N, C, H, W), bias (C), kernel (C, 1, R, S) -> (N, C, H', W').

    Input, bias and kernel are cast to the dtype first, as autocast does. The output has the input's
    memory format.
    """
    kernel = kernel.to(dtype)
    memory_format = torch.contiguous_format
    if is_channels_last(input):
        memory_format = torch.channels_last
    channels = input.shape[1]
    rows = _tile(input.shape[2], kernel.shape[2], padding[0])
    columns = _tile(input.shape[3], kernel.shape[3], padding[1])
    below = padding[0] + rows.patches * rows.side - rows.outputs
    right = padding[1] + columns.patches * columns.side - columns.outputs
    with torch.autocast(input.device.type, enabled=False):
        maps = F.pad(input.to(dtype), (padding[1], right, padding[0], below))
        inputs = maps.unfold(2, rows.inputs, rows.side).unfold(3, columns.inputs, columns.side)
        inputs = inputs.transpose(0, 1).reshape(channels, -1, rows.inputs * columns.inputs)
        outputs = torch.bmm(inputs, _bank(kernel, rows, columns).mT)  # (C, N * patches, T * U)
        outputs = outputs.view(channels, -1, rows.patches, columns.patches, rows.side, columns.side)
        outputs = outputs.permute(1, 0, 2, 4, 3, 5)  # (N, C, patches, T, patches, U)
        outputs = outputs.flatten(4, 5).flatten(2, 3)
        outputs = outputs.narrow(2, 0, rows.outputs).narrow(3, 0, columns.outputs)
        if bias is not None:
            outputs = outputs + bias.to(dtype)[:, None, None]
        return outputs.contiguous(memory_format=memory_format)


class _Tiling(NamedTuple):
    """How patches tile one axis of a map, in cells."""

    outputs: int
    patches: int
    side: int  # outputs of a patch
    inputs: int  # of a patch


def _tile(cells: int, window: int, padding: int) -> _Tiling:
    outputs = cells + 2 * padding - window + 1
    patches = ceil_div(outputs, MAX_PATCH_SIDE)
    side = ceil_div(outputs, patches)
    return _Tiling(outputs=outputs, patches=patches, side=side, inputs=side + window - 1)


def _bank(kernel: Tensor, rows: _Tiling, columns: _Tiling) -> Tensor:
    """Build the bank: (C, 1, R, S) -> (C, T * U, A * B). Its gradient is added up in float32."""
    above = rows.side - 1
    left = columns.side - 1
    exact = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    windows = F.pad(exact[:, 0], (left, left, above, above))
    shifted = windows.unfold(1, rows.inputs, 1).unfold(2, columns.inputs, 1)
    # The first view is the last row of the bank.
    bank = shifted.flip(1, 2).reshape(kernel.shape[0], rows.side * columns.side, -1)
    return bank.to(kernel.dtype)
