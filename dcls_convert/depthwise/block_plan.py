"""How maps of one shape are convolved in blocks: sizes, and the launches of `block_kernels`.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from ..geometry import Pair, ceil_div
from . import block_kernels as kernels
from .launching import Launch, Launches, aligned
from .layouts import BLOCK_SIDE, MAX_OFFSET, is_channels_last

_CELLS: int = kernels.CELLS.value  # of a block
_PACK_CHANNELS: int = kernels.PACK_CHANNELS.value
# The bank's gradient is summed in parts if C x taps programs are fewer than this, so that a large
# GPU is busy.
MIN_PROGRAMS = 1056
MIN_BLOCKS_IN_PART = 256
# If strides and channels are multiples of this, the compiler can load 16 bytes at once.
UNIT = 8
# Sizes of products by the bytes of a number: blocks in one program of the convolution, the sum's
# length in one step, and warps of the convolution. Three products in TF32 need many registers.
BLOCKS_AT_ONCE = {2: 128, 4: 64}
STEP = {2: 64, 4: 32}
WARPS = {2: 4, 4: 8}
GRADIENT_WARPS = 4  # with more, sm_80 spills registers
# Stages of a pipelined loop of products. They fill at most 72 KB of shared memory (of 99 KB or more
# on NVIDIA's GPUs), or 48 KB (of 64 KB on AMD's).
STAGES = 3
STAGES_ON_AMD = 2


class BlockPlan:
    """How maps of one shape are convolved on one device; keeps its launches.

    Args:
        shape: Of the input, (N, C, H, W).
        window: (R, S), both odd.
        stride: 1 or 2 along each axis.
        channels_last: The memory format of the output and of the input's gradient.
        dtype: Of the blocks: bfloat16, float16 or float32.
        device: Of all tensors.
        precision: Of products, for `tl.dot`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        window: Pair,
        stride: Pair,
        *,
        channels_last: bool,
        dtype: torch.dtype,
        device: torch.device,
        precision: str,
    ) -> None:
        images, channels, rows, columns = shape
        block_rows = ceil_div(rows, BLOCK_SIDE)
        block_columns = ceil_div(columns, BLOCK_SIDE)
        blocks = images * block_rows * block_columns
        # Blocks that an output depends on, along each axis; no more than the map has.
        taps_down = 2 * min(ceil_div(window[0] // 2, BLOCK_SIDE), block_rows - 1) + 1
        taps_across = 2 * min(ceil_div(window[1] // 2, BLOCK_SIDE), block_columns - 1) + 1
        self.input_shape = (images, channels, rows, columns)
        self.output_shape = (
            images,
            channels,
            ceil_div(rows, stride[0]),
            ceil_div(columns, stride[1]),
        )
        self.window = window
        self.stride = stride
        self.channels = channels
        self.blocks = blocks
        self.taps = taps_down * taps_across
        # As kernels take them.
        self.map_sizes = (rows, columns, block_rows, block_columns, blocks)
        self.block_sizes = (block_rows, block_columns, taps_down, taps_across)
        self.tap_sizes = (taps_down, taps_across)
        parts = ceil_div(MIN_PROGRAMS, channels * self.taps)
        self.parts = max(1, min(parts, blocks // MIN_BLOCKS_IN_PART))
        step = STEP[dtype.itemsize]
        self.blocks_in_part = ceil_div(ceil_div(blocks, self.parts), step) * step
        self.dtype = dtype
        self.device = device
        self.precision = precision
        self.memory_format = torch.contiguous_format
        if channels_last:
            self.memory_format = torch.channels_last
        self.launches = Launches()

    def pack(self, maps: Tensor, steps: Pair = (1, 1)) -> Tensor:
        """Copy maps into blocks (C, M, CELLS); with steps of 2, zeros come between their cells."""
        blocks = torch.empty(
            (self.channels, self.blocks, _CELLS), dtype=self.dtype, device=self.device
        )
        self._copy_cells(aligned(maps), blocks, steps, unpack=False)
        return blocks

    def unpack(
        self, blocks: Tensor, shape: Sequence[int], dtype: torch.dtype, steps: Pair = (1, 1)
    ) -> Tensor:
        """Copy blocks into new maps; with steps of 2, only every second row or column."""
        maps = torch.empty(
            tuple(shape), dtype=dtype, device=self.device, memory_format=self.memory_format
        )
        self._copy_cells(maps, blocks, steps, unpack=True)
        return maps

    def _copy_cells(self, maps: Tensor, blocks: Tensor, steps: Pair, *, unpack: bool) -> None:
        key = (unpack, maps.stride(), maps.dtype, steps)
        launch = self.launches.find(key)
        if launch is None:
            if max_offset(maps) >= MAX_OFFSET:  # a part of a much larger tensor
                maps = maps.contiguous(memory_format=self.memory_format)
                self._copy_cells(maps, blocks, steps, unpack=unpack)
                return
            launch = self.launches.keep(key, self._pack_launch(maps.stride(), steps, unpack))
        launch(maps, blocks)

    def _pack_launch(self, strides: Sequence[int], steps: Pair, unpack: bool) -> Launch:
        channels_adjacent = strides[1] == 1
        columns_adjacent = strides[3] == 1 and not channels_adjacent
        unit = 1
        if channels_adjacent:
            image_stride, _, row_stride, column_stride = strides
            numbers = (image_stride, row_stride, column_stride, self.channels)
            if all(number % UNIT == 0 for number in numbers):
                unit = UNIT
        strides_in_units = [stride // unit for stride in strides]
        return Launch(
            kernels.pack,
            (self.blocks, ceil_div(self.channels, _PACK_CHANNELS), 1),
            (*strides_in_units, self.channels // unit, *self.map_sizes),
            (*steps, unit, channels_adjacent, columns_adjacent, unpack),
        )

    def bank_of_window(self, window: Tensor) -> Tensor:
        """Make the bank of windows (C, 1, R, S): (C, taps, CELLS, CELLS)."""
        bank = self.new_bank()
        key = ("bank_of_window", window.dtype)
        launch = self.launches.find(key)
        if launch is None:
            grid = (self.taps, self.channels, 1)
            new = Launch(kernels.bank_of_window, grid, self.tap_sizes, self.window)
            launch = self.launches.keep(key, new)
        launch(window.contiguous(), bank)
        return bank

    def new_bank(self) -> Tensor:
        """Allocate a bank (C, taps, CELLS, CELLS)."""
        return torch.empty(
            (self.channels, self.taps, _CELLS, _CELLS), dtype=self.dtype, device=self.device
        )

    def convolve(
        self, blocks: Tensor, bank: Tensor, bias: Tensor | None = None, *, turned: bool = False
    ) -> Tensor:
        """Convolve blocks (C, M, CELLS); with `turned`, by the window turned by 180 degrees."""
        outputs = torch.empty_like(blocks)
        has_bias = bias is not None
        if bias is None:
            bias = blocks  # any tensor
        key = ("convolve", has_bias, bias.dtype, turned)
        launch = self.launches.find(key)
        if launch is None:
            launch = self.launches.keep(key, self._convolve_launch(has_bias, turned))
        launch(blocks, bank, bias.contiguous(), outputs)
        return outputs

    def _convolve_launch(self, has_bias: bool, turned: bool) -> Launch:
        size = self.dtype.itemsize
        at_once = BLOCKS_AT_ONCE[size]
        return Launch(
            kernels.convolve_blocks,
            (ceil_div(self.blocks, at_once), self.channels, 1),
            (self.blocks, *self.block_sizes),
            (has_bias, turned, self.precision, at_once, STEP[size]),
            warps=WARPS[size],
            stages=STAGES_ON_AMD if torch.version.hip else STAGES,
        )

    def gradient_of_bank(self, blocks: Tensor, gradients: Tensor) -> Tensor:
        """Return the bank's gradient as partial sums (parts, C, taps, CELLS, CELLS) in float32."""
        partial_sums = torch.empty(
            (self.parts, self.channels, self.taps, _CELLS, _CELLS),
            dtype=torch.float32,
            device=self.device,
        )
        key = ("gradient_of_bank",)
        launch = self.launches.find(key)
        if launch is None:
            launch = self.launches.keep(key, self._gradient_launch())
        launch(blocks, gradients, partial_sums)
        return partial_sums

    def _gradient_launch(self) -> Launch:
        size = self.dtype.itemsize
        return Launch(
            kernels.gradient_of_bank,
            (self.taps, self.channels, self.parts),
            (self.channels, self.blocks, self.blocks_in_part, *self.block_sizes),
            (self.precision, STEP[size]),
            warps=GRADIENT_WARPS,
            stages=STAGES_ON_AMD if torch.version.hip else STAGES,
        )

    def gradient_of_window(self, partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the bank's gradient to that of the windows (C, 1, R, S)."""
        rows, columns = self.window
        gradient = torch.empty((self.channels, 1, rows, columns), dtype=dtype, device=self.device)
        key = ("diagonals", dtype)
        launch = self.launches.find(key)
        if launch is None:
            new = Launch(
                kernels.diagonals,
                (rows, self.channels, 1),
                (self.channels, self.parts, *self.tap_sizes),
                (rows, columns, next_power_of_2(columns)),
            )
            launch = self.launches.keep(key, new)
        launch(partial_sums, gradient)
        return gradient


def max_offset(maps: Tensor) -> int:
    """Return the offset of an image's last number, or of the next image if that is larger."""
    image_stride, *strides = maps.stride()
    last = 0
    for size, stride in zip(maps.shape[1:], strides, strict=True):
        last += (size - 1) * stride
    return max(last, image_stride)


# Plans by all that they depend on. Their number is bounded: images of all sizes would make many.
_plans: dict[tuple[object, ...], BlockPlan] = {}
MAX_PLANS = 1000


def find_block_plan(input: Tensor, window: Pair, stride: Pair, dtype: torch.dtype) -> BlockPlan:
    """Return the plan for an input (N, C, H, W) and blocks of this dtype."""
    channels_last = is_channels_last(input)
    precision = "ieee"  # of no effect for 16 bits
    if dtype == torch.float32:
        precision = float32_precision()
    key = (input.shape, window, stride, channels_last, dtype, input.device, precision)
    plan = None
    if not torch.compiler.is_compiling():
        plan = _plans.get(key)
    if plan is None:
        plan = BlockPlan(
            input.shape,
            window,
            stride,
            channels_last=channels_last,
            dtype=dtype,
            device=input.device,
            precision=precision,
        )
        if not torch.compiler.is_compiling():
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


@assume_constant_result  # type: ignore[untyped-decorator]
def float32_precision() -> str:
    """Return how products of float32 are computed: with TF32 if torch's own may be."""
    if torch.version.hip:
        return "ieee"
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9; reading the older setting may then raise
        allows_tf32 = matmul.fp32_precision == "tf32"
    else:
        allows_tf32 = matmul.allow_tf32
    return "tf32" if allows_tf32 else "tf32x3"


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
