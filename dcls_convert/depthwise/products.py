"""Depthwise convolution as batched matrix products, in plain torch: for GPUs without `blocks`.

A map is cut into patches of outputs. The outputs of a patch are its inputs times the bank, whose
row (t, u) is the window, shifted to output (t, u). Along one axis, the bank of 3 cells for 2
outputs from 4 inputs is

    k0 k1 k2  0
     0 k0 k1 k2

Axes: N images, C channels, H x W a map, R x S the window, T x U the outputs of a patch, A x B the
inputs that these outputs need. Stride and dilation are 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, ceil_div
from .layouts import is_channels_last

# Outputs of a patch along an axis. By counts of operations, 14 is best for windows of 17.
MAX_PATCH_SIDE = 14


def depthwise_by_products(
    input: Tensor, kernel: Tensor, bias: Tensor | None, padding: Pair
) -> Tensor:
    """Convolve: input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W').

    It is in the input's memory format and the kernel's dtype.
    """
    memory_format = torch.contiguous_format
    if is_channels_last(input):
        memory_format = torch.channels_last
    channels = input.shape[1]
    # Along each axis of a map: its outputs, patches, outputs of a patch, inputs of a patch.
    outputs: list[int] = []
    patches: list[int] = []
    sides: list[int] = []
    inputs: list[int] = []
    widths: list[int] = []  # for F.pad: (before, after) of each axis, the last axis first
    for cells, window, margin in zip(input.shape[2:], kernel.shape[2:], padding, strict=True):
        outputs.append(cells + 2 * margin - window + 1)
        patches.append(ceil_div(outputs[-1], MAX_PATCH_SIDE))
        sides.append(ceil_div(outputs[-1], patches[-1]))
        inputs.append(sides[-1] + window - 1)
        missing = patches[-1] * sides[-1] - outputs[-1]  # of the last patch
        widths = [margin, margin + missing, *widths]
    with torch.autocast(input.device.type, enabled=False):
        maps = F.pad(input.to(kernel.dtype), widths)
        seen = maps.unfold(2, inputs[0], sides[0]).unfold(3, inputs[1], sides[1])
        seen = seen.transpose(0, 1).reshape(channels, -1, inputs[0] * inputs[1])
        result = torch.bmm(seen, _bank(kernel, sides, inputs).mT)  # (C, N * patches, T * U)
        result = result.view(channels, -1, *patches, *sides).permute(1, 0, 2, 4, 3, 5)
        result = result.reshape(-1, channels, patches[0] * sides[0], patches[1] * sides[1])
        result = result.narrow(2, 0, outputs[0]).narrow(3, 0, outputs[1])
        if bias is not None:
            result = result + bias[:, None, None]
        return result.contiguous(memory_format=memory_format)


def _bank(kernel: Tensor, sides: list[int], inputs: list[int]) -> Tensor:
    """Build the bank: (C, 1, R, S) -> (C, T * U, A * B). Its gradient is added up in float32."""
    above = sides[0] - 1
    left = sides[1] - 1
    exact = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    windows = F.pad(exact[:, 0], (left, left, above, above))
    shifted = windows.unfold(1, inputs[0], 1).unfold(2, inputs[1], 1)
    # The first view is the last row of the bank.
    return shifted.flip(1, 2).reshape(kernel.shape[0], sides[0] * sides[1], -1).to(kernel.dtype)
