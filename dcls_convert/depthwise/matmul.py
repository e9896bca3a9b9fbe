"""Depthwise convolution of wide windows as batched matrix products, in plain torch.

Axes: N images, C channels, H x W a feature map (a map, for short), R x S the window, T x U the
outputs in a patch, A x B the inputs that these outputs need.

A map is tiled into patches. The outputs of a patch are its inputs times the bank, a doubly blocked
Toeplitz matrix (T * U, A * B). Its row (t, u) is the window, shifted to output (t, u).
Along one axis, a bank of 3 cells for 2 outputs from 4 inputs is

    k0 k1 k2  0
     0 k0 k1 k2

On two axes, each entry is itself such a matrix, of one row of the window. Stride and dilation are
1. If a map is tiled into several patches, zeros pad the rows of patches and bank to a multiple of
ALIGNED.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, ceil_div

# Largest number of outputs of a patch along an axis. Larger patches read fewer inputs twice, but
# multiply by more zeros: by counts of operations, 14 is best for windows of 17 on maps of 14 to 56.
MAX_PATCH_SIDE = 14
# Rows are padded to a multiple of this many numbers: GPUs multiply rows of whole 16 bytes up to
# three times as fast. Patches of 16 x 16 outputs would need no padding, but by counts of operations
# they are slower for ConvNeXt-T at 224 pixels, because they have more cells than the map.
ALIGNED = 8
# Cap on the memory for patches and banks. If more is needed, channels are computed in parts.
MAX_BYTES = 512 * 2**20
# Most patches in a product, by device type; larger products have wrong sums on M1 and M2.
MAX_PATCHES = {"mps": 32_767}


class PatchTiling(NamedTuple):
    """How patches tile one axis of a map; all in cells, except for `patches`."""

    kernel_size: int
    outputs: int
    patches: int
    outputs_per_patch: int
    inputs_per_patch: int
    padding_before: int  # added before the map; if negative, the map is cropped
    padding_after: int
    omitted_padding: int  # padding before the map that is in neither the patches nor the bank


def _tile_axis(inputs: int, kernel_size: int, padding: int) -> PatchTiling:
    # `len(range(...))` turns a symbolic size into an int: compiling with symbols takes minutes.
    inputs = len(range(inputs))
    outputs = inputs + 2 * padding - kernel_size + 1
    patches = ceil_div(outputs, MAX_PATCH_SIDE)
    outputs_per_patch = ceil_div(outputs, patches)
    inputs_per_patch = outputs_per_patch + kernel_size - 1
    omitted_padding = 0
    if patches == 1:  # the only patch is the map, without padding
        inputs_per_patch = inputs + 2 * min(padding, 0)
        omitted_padding = max(padding, 0)
    padding_before = padding - omitted_padding
    padded = (patches - 1) * outputs_per_patch + inputs_per_patch
    return PatchTiling(
        kernel_size=kernel_size,
        outputs=outputs,
        patches=patches,
        outputs_per_patch=outputs_per_patch,
        inputs_per_patch=inputs_per_patch,
        padding_before=padding_before,
        padding_after=padded - inputs - padding_before,
        omitted_padding=omitted_padding,
    )


def row_length(cells: int, vertical: PatchTiling, horizontal: PatchTiling) -> int:
    """Return the length of a matrix row for these cells, padded if there are several patches."""
    if vertical.patches == horizontal.patches == 1:
        return cells  # such rows are views of the maps; adding zeros would copy them
    return ceil_div(cells, ALIGNED) * ALIGNED


def tile_map(
    map_size: Sequence[int], window: Sequence[int], padding: Sequence[int]
) -> tuple[PatchTiling, PatchTiling]:
    """Return the tilings along the vertical and the horizontal axis; arguments: (rows, columns)."""
    vertical = _tile_axis(map_size[0], window[0], padding[0])
    horizontal = _tile_axis(map_size[1], window[1], padding[1])
    return vertical, horizontal


def _channel_part_count(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> int:
    """Return how many parts to split the channels into, so that each needs at most MAX_BYTES.

    This is the memory for the patches and the bank of a part. There are no more parts than
    channels.
    """
    channels = maps.shape[1]
    patches = maps.shape[0] * vertical.patches * horizontal.patches
    inputs = row_length(
        vertical.inputs_per_patch * horizontal.inputs_per_patch, vertical, horizontal
    )
    outputs = row_length(
        vertical.outputs_per_patch * horizontal.outputs_per_patch, vertical, horizontal
    )
    numbers_per_channel = patches * (inputs + outputs) + inputs * outputs
    bytes_per_channel = numbers_per_channel * maps.element_size()
    # Compared first, so that torch.compile need not know the batch size.
    if channels * bytes_per_channel <= MAX_BYTES:
        return 1
    channels_per_part = max(1, MAX_BYTES // bytes_per_channel)
    return ceil_div(channels, channels_per_part)


def _images_at_once(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> int | None:
    """Return how many images MAX_PATCHES allows, at least one; None if the device has no limit."""
    max_patches = MAX_PATCHES.get(maps.device.type)
    if max_patches is None:
        return None
    return max(1, max_patches // (vertical.patches * horizontal.patches))


def _pad_if_needed(tensor: Tensor, cells: tuple[int, ...]) -> Tensor:
    if not any(cells):
        return tensor  # F.pad would copy it
    return F.pad(tensor, cells)


def _input_patches(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> Tensor:
    """Tile contiguous maps into patches: (N, C, H, W) -> (C, N * patches, row of A * B)."""
    padding = (
        horizontal.padding_before,
        horizontal.padding_after,
        vertical.padding_before,
        vertical.padding_after,
    )
    size = (vertical.inputs_per_patch, horizontal.inputs_per_patch)
    return _extract_patches(_pad_if_needed(maps, padding), size, vertical, horizontal)


def _extract_patches(
    maps: Tensor, size: Pair, vertical: PatchTiling, horizontal: PatchTiling
) -> Tensor:
    """Lay out patches of this size as rows: (N, C, ., .) -> (C, N * patches, row)."""
    patches = maps.unfold(2, size[0], vertical.outputs_per_patch)
    patches = patches.unfold(3, size[1], horizontal.outputs_per_patch).transpose(0, 1)
    cells = size[0] * size[1]
    length = row_length(cells, vertical, horizontal)
    if length == cells:
        return patches.reshape(maps.shape[1], -1, cells)
    filled = maps.new_empty(maps.shape[1], math.prod(patches.shape[1:4]), length)
    filled.narrow(2, 0, cells).view(patches.shape).copy_(patches)
    filled.narrow(2, cells, length - cells).zero_()
    return filled


def _bank(kernel: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> Tensor:
    """Build the bank: (C, 1, R, S) -> (C, rows of T * U, row of A * B).

    Along one axis, entry (t, a) is cell a - t + omitted_padding of the kernel, or 0 outside it. So
    row t is a slice of the kernel with zeros around it, which begins one cell before that of row
    t - 1.
    """
    left = horizontal.outputs_per_patch - 1 - horizontal.omitted_padding
    right = horizontal.inputs_per_patch + horizontal.omitted_padding - horizontal.kernel_size
    top = vertical.outputs_per_patch - 1 - vertical.omitted_padding
    bottom = vertical.inputs_per_patch + vertical.omitted_padding - vertical.kernel_size
    windows = _pad_if_needed(kernel[:, 0], (left, right, top, bottom))
    # Number the cells, and gather them by number: a flipped view of the windows themselves would be
    # copied twice.
    cells = torch.arange(windows[0].numel(), device=kernel.device).view(windows.shape[1:])
    shifted = cells.unfold(0, vertical.inputs_per_patch, 1)
    shifted = shifted.unfold(1, horizontal.inputs_per_patch, 1)
    # The first view is the last row of the bank.
    index = shifted.flip(0, 1).reshape(
        vertical.outputs_per_patch * horizontal.outputs_per_patch, -1
    )
    height = row_length(index.shape[0], vertical, horizontal)
    width = row_length(index.shape[1], vertical, horizontal)
    # Added entries get the number of cell 0. It is a zero, since they are added only if there are
    # several patches, for which the window is padded at this corner.
    index = F.pad(index, (0, width - index.shape[1], 0, height - index.shape[0]))
    return windows.flatten(1).index_select(1, index.flatten()).view(-1, height, width)


def convolve(
    maps: Tensor, kernel: Tensor, padding: Sequence[int], *, channels_last: bool = False
) -> Tensor:
    """Convolve: (N, C, H, W), (C, 1, R, S) -> (N, C, H', W'), contiguous or channels_last.

    Maps should be contiguous; other maps are transposed patch by patch.
    """
    vertical, horizontal = tile_map(maps.shape[2:], kernel.shape[2:], padding)
    images = _images_at_once(maps, vertical, horizontal)
    if images is not None and maps.shape[0] > images:
        parts = [
            convolve(part, kernel, padding, channels_last=channels_last)
            for part in torch.split(maps, images)
        ]
        return torch.cat(parts)
    part_count = _channel_part_count(maps, vertical, horizontal)
    products = []
    for part, windows in zip(
        maps.tensor_split(part_count, 1), kernel.tensor_split(part_count), strict=True
    ):
        patches = _input_patches(part, vertical, horizontal)
        products.append(torch.bmm(patches, _bank(windows, vertical, horizontal).mT))
    outputs = torch.cat(products) if len(products) > 1 else products[0]
    return _as_maps(outputs, vertical, horizontal, channels_last=channels_last)


def _as_maps(
    outputs: Tensor, vertical: PatchTiling, horizontal: PatchTiling, *, channels_last: bool
) -> Tensor:
    """Put the outputs of patches together: (C, N * patches, row of T * U) -> (N, C, H', W')."""
    channels = outputs.shape[0]
    height = vertical.patches * vertical.outputs_per_patch
    width = horizontal.patches * horizontal.outputs_per_patch
    patch_size = (vertical.outputs_per_patch, horizontal.outputs_per_patch)
    outputs = outputs.narrow(2, 0, patch_size[0] * patch_size[1])
    # (C, N, patches, patches, T, U)
    outputs = outputs.view(channels, -1, vertical.patches, horizontal.patches, *patch_size)
    images = outputs.shape[1]
    if channels_last:
        maps = outputs.permute(1, 2, 4, 3, 5, 0).reshape(images, height, width, channels)
        maps = maps.permute(0, 3, 1, 2)
        memory_format = torch.channels_last
    else:
        maps = outputs.permute(1, 0, 2, 4, 3, 5).reshape(images, channels, height, width)
        memory_format = torch.contiguous_format
    maps = maps.narrow(2, 0, vertical.outputs).narrow(3, 0, horizontal.outputs)
    return maps.contiguous(memory_format=memory_format)


def weight_gradient(
    maps: Tensor, grad_output: Tensor, window: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Compute the kernel's gradient: (N, C, H, W), grad_output (N, C, H', W') -> (C, 1, R, S)."""
    vertical, horizontal = tile_map(maps.shape[2:], window, padding)
    images = _images_at_once(maps, vertical, horizontal)
    if images is not None and maps.shape[0] > images:
        total: Tensor | float = 0.0
        for part, grad_of_part in zip(
            torch.split(maps, images), torch.split(grad_output, images), strict=True
        ):
            total = total + weight_gradient(part, grad_of_part, window, padding)
        return cast(Tensor, total)
    patch_size = (vertical.outputs_per_patch, horizontal.outputs_per_patch)
    below = vertical.patches * patch_size[0] - vertical.outputs
    right = horizontal.patches * patch_size[1] - horizontal.outputs
    grad_output = _pad_if_needed(grad_output, (0, right, 0, below))
    part_count = _channel_part_count(maps, vertical, horizontal)
    gradients = []
    for part, grad_of_part in zip(
        maps.tensor_split(part_count, 1), grad_output.tensor_split(part_count, 1), strict=True
    ):
        grad_patches = _extract_patches(grad_of_part, patch_size, vertical, horizontal)
        grad_bank = torch.bmm(grad_patches.mT, _input_patches(part, vertical, horizontal))
        gradients.append(_gradient_from_bank(grad_bank, vertical, horizontal))
    return torch.cat(gradients).unsqueeze(1).to(maps.dtype)


def _gradient_from_bank(
    grad_bank: Tensor, vertical: PatchTiling, horizontal: PatchTiling
) -> Tensor:
    """Turn the gradient of the bank into that of the kernel: (C, T * U, A * B) -> (C, R, S).

    The bank may be padded on its last two axes.
    """
    patch_size = (vertical.outputs_per_patch, horizontal.outputs_per_patch)
    input_size = (vertical.inputs_per_patch, horizontal.inputs_per_patch)
    grad_bank = grad_bank.narrow(1, 0, patch_size[0] * patch_size[1])
    grad_bank = grad_bank.narrow(2, 0, input_size[0] * input_size[1])
    grad_bank = grad_bank.view(-1, *patch_size, *input_size)  # (C, T, U, A, B)
    horizontal_sums = _sum_diagonals(grad_bank.transpose(1, 2), horizontal)  # (C, T, A, S)
    return _sum_diagonals(horizontal_sums.transpose(2, 3), vertical).mT


def _sum_diagonals(bank: Tensor, tiling: PatchTiling) -> Tensor:
    """Sum the entries of each kernel cell along an axis.

    (C, outputs per patch, ..., inputs per patch) -> (C, ..., kernel size). Kernel cell r is the sum
    of all entries whose input is r cells after their output.
    """
    before = tiling.omitted_padding
    after = tiling.outputs_per_patch + tiling.kernel_size - 1 - tiling.inputs_per_patch - before
    bank = _pad_if_needed(bank, (before, after))
    diagonals = bank.unfold(-1, tiling.kernel_size, 1).diagonal(0, 1, -2)
    return diagonals.sum(-1, dtype=torch.promote_types(bank.dtype, torch.float32))


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution by `convolve`, with gradients.

    Backward consists of differentiable operations, so that there are gradients of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, kernel: Tensor, padding: tuple[int, int], channels_last: bool
    ) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(maps, kernel)
        with torch.autocast(maps.device.type, enabled=False):
            return convolve(maps, kernel, padding, channels_last=channels_last)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        maps, kernel = ctx.saved_tensors
        window = kernel.shape[2:]
        channels_last = is_channels_last(grad_output)
        grad_output = grad_output.contiguous()  # transposed once, for both gradients
        grad_input = None
        grad_weight = None
        with torch.autocast(maps.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                padding = [size - 1 - pad for size, pad in zip(window, ctx.padding, strict=True)]
                flipped = kernel.flip(2, 3)
                grad_input = convolve(grad_output, flipped, padding, channels_last=channels_last)
            if ctx.needs_input_grad[1]:
                grad_weight = weight_gradient(maps, grad_output, window, ctx.padding)
        return grad_input, grad_weight, None, None


def is_channels_last(maps: Tensor) -> bool:
    """True if feature maps (N, C, H, W), or slices of them, are channels_last and not contiguous.

    Maps of one channel or one cell are both, so they give False.
    """
    # Two separate checks: in one expression, torch.compile would see a symbol, which functions of
    # constants do not accept.
    if maps.stride(1) != 1:
        return False
    return not maps.is_contiguous()


def depthwise(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Tensor:
    """Convolve: input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W').

    The stride must be 1. The output is in the input's memory format and the kernel's dtype.
    """
    # Cast and transpose in a single copy, which is also kept for the backward pass.
    maps = input.to(kernel.dtype, memory_format=torch.contiguous_format)
    output = cast(Tensor, _Depthwise.apply(maps, kernel, padding, is_channels_last(input)))
    if bias is None:
        return output
    return output + bias[:, None, None]
