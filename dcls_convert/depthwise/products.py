"""Depthwise convolution as batched matrix products, in plain torch: for GPUs without `blocks`.

A map is cut into patches of outputs. The outputs of a patch are its inputs times the bank, whose
row (t, u) is the window, shifted to output (t, u). Along one axis, the bank of 3 cells for 2
outputs from 4 inputs is

    k0 k1 k2  0
     0 k0 k1 k2

Axes: N images, C channels, H x W a map, R x S the window, T x U the outputs of a patch, A x B the
inputs that these outputs need. Stride and dilation are 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, ceil_div
from .layouts import is_channels_last

# Outputs of a patch along an axis. By counts of operations, 14 is best for windows of 17.
MAX_PATCH_SIDE = 14


class _Tiling(NamedTuple):
    """How patches tile one axis of a map, in cells."""

    outputs: int
    patches: int
    outputs_per_patch: int
    inputs_per_patch: int
    missing_outputs: int  # outputs of the last patch that lie beyond the map


def _tile(inputs: int, window: int, padding: int) -> _Tiling:
    outputs = inputs + 2 * padding - window + 1
    patches = ceil_div(outputs, MAX_PATCH_SIDE)
    outputs_per_patch = ceil_div(outputs, patches)
    return _Tiling(
        outputs=outputs,
        patches=patches,
        outputs_per_patch=outputs_per_patch,
        inputs_per_patch=outputs_per_patch + window - 1,
        missing_outputs=patches * outputs_per_patch - outputs,
    )


def _patches(maps: Tensor, side: Pair, step: Pair) -> Tensor:
    """Lay out overlapping patches as rows: (N, C, ., .) -> (C, N * patches, cells of a patch)."""
    patches = maps.unfold(2, side[0], step[0]).unfold(3, side[1], step[1])
    return patches.transpose(0, 1).reshape(maps.shape[1], -1, side[0] * side[1])


def _input_patches(maps: Tensor, tilings: Sequence[_Tiling], padding: Sequence[int]) -> Tensor:
    """Lay out the inputs of all patches: (N, C, H, W) -> (C, N * patches, A * B)."""
    rows, columns = tilings
    below = padding[0] + rows.missing_outputs
    right = padding[1] + columns.missing_outputs
    maps = F.pad(maps, (padding[1], right, padding[0], below))
    return _patches(
        maps,
        (rows.inputs_per_patch, columns.inputs_per_patch),
        (rows.outputs_per_patch, columns.outputs_per_patch),
    )


def _bank(kernel: Tensor, tilings: Sequence[_Tiling]) -> Tensor:
    """Build the bank: (C, 1, R, S) -> (C, T * U, A * B)."""
    rows, columns = tilings
    above = rows.outputs_per_patch - 1
    left = columns.outputs_per_patch - 1
    windows = F.pad(kernel[:, 0], (left, left, above, above))
    shifted = windows.unfold(1, rows.inputs_per_patch, 1).unfold(2, columns.inputs_per_patch, 1)
    # The first view is the last row of the bank.
    return shifted.flip(1, 2).reshape(
        kernel.shape[0], rows.outputs_per_patch * columns.outputs_per_patch, -1
    )


def _convolve(maps: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
    """Convolve: (N, C, H, W), (C, 1, R, S) -> (N, C, H', W'), any strides."""
    tilings = list(map(_tile, maps.shape[2:], kernel.shape[2:], padding))
    rows, columns = tilings
    patches = _input_patches(maps, tilings, padding)
    outputs = torch.bmm(patches, _bank(kernel, tilings).mT)
    side = (rows.outputs_per_patch, columns.outputs_per_patch)
    outputs = outputs.view(maps.shape[1], -1, rows.patches, columns.patches, *side)
    outputs = outputs.permute(1, 0, 2, 4, 3, 5)  # (N, C, patches, T, patches, U)
    outputs = outputs.reshape(-1, maps.shape[1], rows.patches * side[0], columns.patches * side[1])
    return outputs.narrow(2, 0, rows.outputs).narrow(3, 0, columns.outputs)


def _weight_gradient(
    maps: Tensor, grad_output: Tensor, window: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Compute the kernel's gradient: (N, C, H, W), grad_output (N, C, H', W') -> (C, 1, R, S)."""
    tilings = list(map(_tile, maps.shape[2:], window, padding))
    rows, columns = tilings
    side = (rows.outputs_per_patch, columns.outputs_per_patch)
    grad_output = F.pad(grad_output, (0, columns.missing_outputs, 0, rows.missing_outputs))
    grad_patches = _patches(grad_output, side, side)
    grad_bank = torch.bmm(grad_patches.mT, _input_patches(maps, tilings, padding))
    grad_bank = grad_bank.view(-1, *side, rows.inputs_per_patch, columns.inputs_per_patch)
    # Cell (r, s) is the sum of all entries whose input is (r, s) cells after their output.
    sums = grad_bank.unfold(3, window[0], 1).diagonal(0, 1, 3)  # (C, U, B, R, T)
    sums = sums.sum(-1, dtype=torch.promote_types(grad_bank.dtype, torch.float32))
    sums = sums.unfold(2, window[1], 1).diagonal(0, 1, 2).sum(-1)  # (C, R, S)
    return sums.unsqueeze(1).to(maps.dtype)


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution by `_convolve`; its backward pass can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, kernel: Tensor, padding: Pair) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(maps, kernel)
        with torch.autocast(maps.device.type, enabled=False):
            return _convolve(maps, kernel, padding)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        maps, kernel = ctx.saved_tensors
        window = kernel.shape[2:]
        grad_input = grad_weight = None
        with torch.autocast(maps.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                padding = [size - 1 - pad for size, pad in zip(window, ctx.padding, strict=True)]
                grad_input = _convolve(grad_output, kernel.flip(2, 3), padding)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_gradient(maps, grad_output, window, ctx.padding)
        return grad_input, grad_weight, None


def depthwise_by_products(
    input: Tensor, kernel: Tensor, bias: Tensor | None, padding: Pair
) -> Tensor:
    """Convolve: input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W').

    It is in the input's memory format and the kernel's dtype.
    """
    memory_format = torch.contiguous_format
    if is_channels_last(input):
        memory_format = torch.channels_last
    output = cast(Tensor, _Depthwise.apply(input.to(kernel.dtype), kernel, padding))
    output = output.contiguous(memory_format=memory_format)
    if bias is None:
        return output
    return output + bias[:, None, None]
