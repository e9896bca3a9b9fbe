"""Depthwise convolution of wide windows as batched matrix products, in plain torch.

Axes: N images, C channels, H x W a feature map (a map, for short), R x S the window, T x U the
outputs in a patch, A x B the inputs that these outputs need.

A map is tiled into patches. The outputs of a patch are its inputs times the bank: a doubly blocked
Toeplitz matrix (T * U, A * B). Row (t, u) holds the window, shifted to that output.
Along one axis, a bank of 3 cells for 2 outputs from 4 inputs is

    k0 k1 k2  0
     0 k0 k1 k2

and on two axes each entry is such a matrix of one row of the window. Stride and dilation are 1.
Where a map is tiled into several patches, zeros fill the rows of patches and bank up to a multiple
of ALIGNED.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Pair, ceil_div

# Outputs of a patch along an axis. Larger patches read fewer inputs twice, but multiply by more
# zeros: by counts of operations, 14 is best for windows of 17 on maps of 14 to 56.
MAX_PATCH_SIDE = 14
# Numbers: GPUs multiply rows of whole 16 bytes up to three times as fast. Patches of 16 x 16
# outputs need no zeros, but by counts of operations they are slower for ConvNeXt-T at 224 pixels:
# they have more cells than the map.
ALIGNED = 8
# Cap on the memory for patches and banks; more is computed in parts, split along the channels.
MAX_BYTES = 512 * 2**20
# Patches that a product takes, by the device's type; more give wrong sums on M1 and M2.
MAX_PATCHES = {"mps": 32_767}


class PatchTiling(NamedTuple):
    """How patches tile one axis of a map; all in cells, except for `patches`."""

    kernel_size: int
    outputs: int
    patches: int
    outputs_per_patch: int
    inputs_per_patch: int
    padding_before: int  # to put before the map; if negative, cells are cut off the map
    padding_after: int
    omitted_padding: int  # before the map, for which neither patches nor the bank have cells


def _tile_axis(inputs: int, kernel_size: int, padding: int) -> PatchTiling:
    # `len(range(...))` makes an int of a symbolic size: compiling with symbols takes minutes.
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
    """Length of a matrix row for this many cells: padded if there are several patches."""
    if vertical.patches == horizontal.patches == 1:
        return cells  # such rows are views of the maps; to add zeros would copy them
    return ceil_div(cells, ALIGNED) * ALIGNED


def tile_map(
    map_size: Sequence[int], window: Sequence[int], padding: Sequence[int]
) -> tuple[PatchTiling, PatchTiling]:
    """The tilings along the vertical and the horizontal axis; arguments are in this order too."""
    vertical = _tile_axis(map_size[0], window[0], padding[0])
    horizontal = _tile_axis(map_size[1], window[1], padding[1])
    return vertical, horizontal


def _parts_of_channels(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> int:
    """The number of parts, along the channels, so that one needs at most MAX_BYTES.

    Its patches and its bank count. There is at most one part per channel.
    """
    channels = maps.shape[1]
    patches = maps.shape[0] * vertical.patches * horizontal.patches
    inputs = row_length(
        vertical.inputs_per_patch * horizontal.inputs_per_patch, vertical, horizontal
    )
    outputs = row_length(
        vertical.outputs_per_patch * horizontal.outputs_per_patch, vertical, horizontal
    )
    bytes_each = (patches * (inputs + outputs) + inputs * outputs) * maps.element_size()
    # Compared first, so that torch.compile need not know the size of the batch.
    if channels * bytes_each <= MAX_BYTES:
        return 1
    return ceil_div(channels, max(1, MAX_BYTES // bytes_each))


def _images_at_once(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> int | None:
    """As many images as MAX_PATCHES allows, at least one; None if the device has no bound."""
    most = MAX_PATCHES.get(maps.device.type)
    if most is None:
        return None
    return max(1, most // (vertical.patches * horizontal.patches))


def _padded(tensor: Tensor, cells: tuple[int, ...]) -> Tensor:
    if not any(cells):
        return tensor  # F.pad would copy it
    return F.pad(tensor, cells)


def _input_patches(maps: Tensor, vertical: PatchTiling, horizontal: PatchTiling) -> Tensor:
    """(N, C, H, W), contiguous -> (C, N * patches, row of A * B)."""
    padding = (
        horizontal.padding_before,
        horizontal.padding_after,
        vertical.padding_before,
        vertical.padding_after,
    )
    size = (vertical.inputs_per_patch, horizontal.inputs_per_patch)
    return _extract_patches(_padded(maps, padding), size, vertical, horizontal)


def _extract_patches(
    maps: Tensor, size: Pair, vertical: PatchTiling, horizontal: PatchTiling
) -> Tensor:
    """(N, C, ., .) -> (C, N * patches, row), each row a patch of this size."""
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
    """(C, 1, R, S) -> (C, rows of T * U, row of A * B).

    Along one axis, entry (t, a) is cell a - t + omitted_padding of the kernel, or 0 outside it. So
    row t is a part of the kernel with zeros around it, and begins one cell before row t - 1.
    """
    left = horizontal.outputs_per_patch - 1 - horizontal.omitted_padding
    right = horizontal.inputs_per_patch + horizontal.omitted_padding - horizontal.kernel_size
    top = vertical.outputs_per_patch - 1 - vertical.omitted_padding
    bottom = vertical.inputs_per_patch + vertical.omitted_padding - vertical.kernel_size
    windows = _padded(kernel[:, 0], (left, right, top, bottom))
    # Cells are numbered, and then gathered by number: a flipped view of the windows themselves
    # would be copied twice.
    cells = torch.arange(windows[0].numel(), device=kernel.device).view(windows.shape[1:])
    shifted = cells.unfold(0, vertical.inputs_per_patch, 1)
    shifted = shifted.unfold(1, horizontal.inputs_per_patch, 1)
    # The first view is the last row of the bank.
    index = shifted.flip(0, 1).reshape(
        vertical.outputs_per_patch * horizontal.outputs_per_patch, -1
    )
    height = row_length(index.shape[0], vertical, horizontal)
    width = row_length(index.shape[1], vertical, horizontal)
    # What is added takes cell 0: with several patches, the zero in the corner of the padded window.
    index = F.pad(index, (0, width - index.shape[1], 0, height - index.shape[0]))
    return windows.flatten(1).index_select(1, index.flatten()).view(-1, height, width)


def convolve(
    maps: Tensor, kernel: Tensor, padding: Sequence[int], *, channels_last: bool = False
) -> Tensor:
    """(N, C, H, W), (C, 1, R, S) -> (N, C, H', W'), contiguous or channels_last.

    Maps are best contiguous, or else they are transposed patch by patch.
    """
    vertical, horizontal = tile_map(maps.shape[2:], kernel.shape[2:], padding)
    images = _images_at_once(maps, vertical, horizontal)
    if images is not None and maps.shape[0] > images:
        parts = [
            convolve(part, kernel, padding, channels_last=channels_last)
            for part in torch.split(maps, images)
        ]
        return torch.cat(parts)
    count = _parts_of_channels(maps, vertical, horizontal)
    products = []
    for part, windows in zip(maps.tensor_split(count, 1), kernel.tensor_split(count), strict=True):
        patches = _input_patches(part, vertical, horizontal)
        products.append(torch.bmm(patches, _bank(windows, vertical, horizontal).mT))
    outputs = torch.cat(products) if len(products) > 1 else products[0]
    return _as_maps(outputs, vertical, horizontal, channels_last=channels_last)


def _as_maps(
    outputs: Tensor, vertical: PatchTiling, horizontal: PatchTiling, *, channels_last: bool
) -> Tensor:
    """(C, N * patches, row of T * U) -> (N, C, H', W')."""
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
    """(N, C, H, W) and the gradient of the outputs, (N, C, H', W') -> (C, 1, R, S)."""
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
    grad_output = _padded(grad_output, (0, right, 0, below))
    sums = []
    count = _parts_of_channels(maps, vertical, horizontal)
    for part, grad_of_part in zip(
        maps.tensor_split(count, 1), grad_output.tensor_split(count, 1), strict=True
    ):
        grad_patches = _extract_patches(grad_of_part, patch_size, vertical, horizontal)
        grad_bank = torch.bmm(grad_patches.mT, _input_patches(part, vertical, horizontal))
        grad_bank = grad_bank.narrow(1, 0, patch_size[0] * patch_size[1])
        inputs = vertical.inputs_per_patch * horizontal.inputs_per_patch
        grad_bank = grad_bank.narrow(2, 0, inputs)
        grad_bank = grad_bank.view(
            -1, *patch_size, vertical.inputs_per_patch, horizontal.inputs_per_patch
        )
        horizontal_sums = _sum_diagonals(grad_bank.transpose(1, 2), horizontal)  # (C, T, A, S)
        sums.append(_sum_diagonals(horizontal_sums.transpose(2, 3), vertical).mT)
    return torch.cat(sums).unsqueeze(1).to(maps.dtype)


def _sum_diagonals(bank: Tensor, tiling: PatchTiling) -> Tensor:
    """(C, outputs per patch, ..., inputs per patch) -> (C, ..., kernel size).

    Kernel cell r is the sum of all entries whose input is r cells after their output.
    """
    before = tiling.omitted_padding
    after = tiling.outputs_per_patch + tiling.kernel_size - 1 - tiling.inputs_per_patch - before
    bank = _padded(bank, (before, after))
    diagonals = bank.unfold(-1, tiling.kernel_size, 1).diagonal(0, 1, -2)
    return diagonals.sum(-1, dtype=torch.promote_types(bank.dtype, torch.float32))


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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        maps, kernel = ctx.saved_tensors
        window = kernel.shape[2:]
        channels_last = is_channels_last(grad_output)
        grad_output = grad_output.contiguous()  # transposed once, for both gradients
        grad_input = None
        grad_weight = None
        with torch.autocast(maps.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                rest = [size - 1 - pad for size, pad in zip(window, ctx.padding, strict=True)]
                flipped = kernel.flip(2, 3)
                grad_input = convolve(grad_output, flipped, rest, channels_last=channels_last)
            if ctx.needs_input_grad[1]:
                grad_weight = weight_gradient(maps, grad_output, window, ctx.padding)
        return grad_input, grad_weight, None, None


def is_channels_last(maps: Tensor) -> bool:
    """Whether feature maps (N, C, H, W), or slices of them, are channels_last and not contiguous.

    Maps of one channel or one cell are both.
    """
    # Asked one after the other: for torch.compile, both at once would be a symbol, which functions
    # of constants do not take.
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
    """input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W'); the stride is 1.

    The output is in the input's memory format and the kernel's dtype.
    """
    # Cast and transposed in one copy, which the backward pass has too.
    maps = input.to(kernel.dtype, memory_format=torch.contiguous_format)
    output = cast(Tensor, _Depthwise.apply(maps, kernel, padding, is_channels_last(input)))
    if bias is None:
        return output
    return output + bias[:, None, None]
