"""How maps of one shape are convolved in blocks: sizes, and the launches of `block_kernels`.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..depthwise import block_kernels as kernels
from ..geometry import Pair, ceil_div
from .devices import adds_three_taps, float32_precision
from .launching import LOAD_BYTES, Launch
from .layouts import (
    BLOCK_SIDE,
    MAX_OFFSET,
    is_channels_last,
)

_CELLS: int = kernels.CELLS.value  # of a block
# The bank's gradient is summed in parts if there are fewer programs than this, so that a large GPU
# is busy.
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
# on NVIDIA's GPUs), or 96 KB where three taps are added at once (of 227 KB), or 48 KB (of 64 KB on
# AMD's).
STAGES = 3
STAGES_ON_AMD = 2


class BlockPlan(ABC):
    """How maps of one shape are convolved on one device; keeps its launches.

    Subclasses know what the bank is made of. In their methods, `kernel` is the window, or the
    weight and positions that make it.

    Args:
        maps: The input (N, C, H, W), or one like it in shape, memory format, dtype and device. The
            output and the input's gradient have its memory format.
        window: (R, S), both odd.
        stride: 1 or 2 along each axis.
        dtype: The dtype of the blocks: bfloat16, float16 or float32.
        has_bias: Whether a bias is added.
        output_dtype: The dtype of the output. Default: that of the blocks.
    """

    def __init__(
        self,
        maps: Tensor,
        window: Pair,
        stride: Pair,
        dtype: torch.dtype,
        *,
        has_bias: bool,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        images, channels, rows, columns = maps.shape
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
        self.input_dtype = maps.dtype
        self.dtype = dtype
        self.output_dtype = output_dtype or dtype
        self.device = maps.device
        self.window = window
        self.stride = stride
        self.has_bias = has_bias
        self.channels = channels
        self.blocks = blocks
        self.taps = taps_down * taps_across
        # As kernels take them.
        self.map_sizes = (rows, columns, block_rows, block_columns, blocks)
        self.tap_sizes = (taps_down, taps_across)
        self.blocks_shape = (channels, blocks, _CELLS)
        self.bank_shape = (channels, self.taps, _CELLS, _CELLS)
        self._packs: dict[tuple[object, ...], Launch] = {}
        channels_last = is_channels_last(maps)
        self._memory_format = torch.contiguous_format
        if channels_last:
            self._memory_format = torch.channels_last
        self._unpack_output = self._unpack_launch(self.output_shape, channels_last, stride)
        self._unpack_gradient = self._unpack_launch(self.input_shape, channels_last, (1, 1))
        self._prepare_products((blocks, block_rows, block_columns, taps_down, taps_across))

    def _prepare_products(self, sizes: tuple[int, ...]) -> None:
        size = self.dtype.itemsize
        precision = "ieee"  # of no effect for 16 bits
        if self.dtype == torch.float32:
            precision = float32_precision()
        stages = STAGES_ON_AMD if torch.version.hip else STAGES
        at_once = BLOCKS_AT_ONCE[size]

        def convolve(has_bias: bool, turned: bool) -> Launch:
            return Launch(
                kernels.convolve_blocks,
                (ceil_div(self.blocks, at_once), self.channels, 1),
                sizes,
                (has_bias, turned, precision, at_once, STEP[size]),
                warps=WARPS[size],
                stages=stages,
            )

        self._convolve = convolve(self.has_bias, False)
        self._convolve_turned = convolve(False, True)
        taps_down, taps_across = self.tap_sizes
        three = taps_across == 3 and size == 2 and adds_three_taps(self.device)
        programs = taps_down if three else self.taps
        parts = ceil_div(MIN_PROGRAMS, self.channels * programs)
        self.parts = max(1, min(parts, self.blocks // MIN_BLOCKS_IN_PART))
        blocks_in_part = ceil_div(ceil_div(self.blocks, self.parts), STEP[size]) * STEP[size]
        self._gradient_of_bank = Launch(
            kernels.gradient_of_bank,
            (programs, self.channels, self.parts),
            (self.channels, blocks_in_part, *sizes),
            (precision, STEP[size], three),
            warps=GRADIENT_WARPS,
            stages=stages,
        )

    @abstractmethod
    def pack_with_bank(self, maps: Tensor, *kernel: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy maps into blocks (C, M, CELLS), and make the bank (C, taps, CELLS, CELLS).

        Also returns clamped positions, if the kernel has some: they can change before the backward
        pass.
        """

    @abstractmethod
    def gradients_of_kernel(
        self, partial_sums: Tensor, sums: Tensor, *kernel: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the bias and the kernel, from `gradient_of_bank` and `sums`."""

    @abstractmethod
    def window_by_torch(self, *kernel: Tensor) -> Tensor:
        """Return the window (C, 1, R, S) by torch's operations, which can be differentiated."""

    def pack_gradients(self, gradients: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the output's gradients into blocks like the inputs', and add up each block: (C, M).

        With a stride of 2, zeros come between the gradients.
        """
        blocks = torch.empty_like(inputs)
        sums = gradients  # without a bias, the kernel ignores them, but it must get a tensor
        if self.has_bias:
            sums = torch.empty(self.blocks_shape[:2], dtype=torch.float32, device=self.device)
        launch, gradients = self.find_pack(gradients, self._pack_gradients_launch)
        launch.run(gradients, blocks, sums)
        return blocks, sums

    def find_pack(self, maps: Tensor, make: Callable[[Tensor], Launch]) -> tuple[Launch, Tensor]:
        """Return the launch that packs these maps, kept from an earlier call or new, and the maps.

        They are copied if they begin at a wrong address or their rows are too far apart.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and maps.data_ptr() % LOAD_BYTES:
            maps = maps.clone()
        key = (make.__name__, maps.stride(), maps.dtype)
        launch = None
        if not is_compiling:
            launch = self._packs.get(key)
        if launch is None:
            if max_offset(maps) >= MAX_OFFSET:  # a part of a much larger tensor
                return self.find_pack(maps.clone(memory_format=self._memory_format), make)
            launch = make(maps)
            if not is_compiling:
                self._packs[key] = launch
        return launch, maps

    def _pack_gradients_launch(self, maps: Tensor) -> Launch:
        return self.copy_launch(maps.stride(), self.stride, unpack=False, sums=self.has_bias)

    def _unpack_launch(self, shape: Sequence[int], channels_last: bool, steps: Pair) -> Launch:
        _, channels, rows, columns = shape
        strides = (channels * rows * columns, rows * columns, columns, 1)
        if channels_last:
            strides = (channels * rows * columns, 1, columns * channels, channels)
        return self.copy_launch(strides, steps, unpack=True, sums=False)

    def copy_launch(
        self, strides: Sequence[int], steps: Pair, *, unpack: bool, sums: bool
    ) -> Launch:
        sizes, layout = self.layout_of(strides)
        grid = (self.blocks, ceil_div(self.channels, kernels.PACK_CHANNELS.value), 1)
        return Launch(kernels.pack, grid, sizes, (*steps, *layout, unpack, sums))

    def layout_of(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int | bool, ...]]:
        """Return the sizes and the constants of `pack` for maps of these strides."""
        channels_adjacent = strides[1] == 1
        columns_adjacent = strides[3] == 1 and not channels_adjacent
        unit = 1
        if channels_adjacent:
            image_stride, _, row_stride, column_stride = strides
            numbers = (image_stride, row_stride, column_stride, self.channels)
            if all(number % UNIT == 0 for number in numbers):
                unit = UNIT
        # Where channels are adjacent, their stride is not used.
        strides_in_units = [stride // unit for stride in strides]
        sizes = (*strides_in_units, self.channels // unit, *self.map_sizes)
        return sizes, (unit, channels_adjacent, columns_adjacent)

    def convolve(self, blocks: Tensor, bank: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve blocks (C, M, CELLS) to maps (N, C, H', W')."""
        outputs = torch.empty_like(blocks)
        # Without a bias, the kernel ignores this argument, but it must be a tensor.
        added = blocks if bias is None else bias.contiguous()
        self._convolve.run(blocks, bank, added, outputs)
        return self._unpack(self._unpack_output, outputs, self.output_shape, self.output_dtype)

    def gradient_of_input(self, gradients: Tensor, bank: Tensor) -> Tensor:
        """Return the gradient of the input (N, C, H, W) from that of the output, in blocks."""
        outputs = torch.empty_like(gradients)
        self._convolve_turned.run(gradients, bank, gradients, outputs)
        return self._unpack(self._unpack_gradient, outputs, self.input_shape, self.input_dtype)

    def _unpack(
        self,
        unpack: Launch,
        blocks: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        maps = torch.empty(
            shape, dtype=dtype, device=self.device, memory_format=self._memory_format
        )
        unpack.run(maps, blocks, blocks)
        return maps

    def gradient_of_bank(self, blocks: Tensor, gradients: Tensor) -> Tensor:
        """Return the bank's gradient as partial sums (parts, C, taps, CELLS, CELLS) in float32."""
        partial_sums = torch.empty(
            (self.parts, *self.bank_shape), dtype=torch.float32, device=self.device
        )
        self._gradient_of_bank.run(blocks, gradients, partial_sums)
        return partial_sums


class WindowPlan(BlockPlan):
    """A plan whose bank is made of windows (C, 1, R, S)."""

    def __init__(
        self, maps: Tensor, window: Pair, stride: Pair, dtype: torch.dtype, *, has_bias: bool
    ) -> None:
        super().__init__(maps, window, stride, dtype, has_bias=has_bias)
        rows, columns = window
        self._bank_of_window = Launch(
            kernels.bank_of_window, (self.taps, self.channels, 1), self.tap_sizes, window
        )
        self._gradient_of_window = Launch(
            kernels.gradient_of_window,
            (ceil_div(rows * columns, kernels.GATHERED.value), self.channels, 1),
            (self.channels, self.parts, self.blocks, *self.tap_sizes),
            (rows, columns, has_bias),
        )

    def pack_with_bank(self, maps: Tensor, *kernel: Tensor) -> tuple[Tensor, Tensor, None]:
        """Copy maps into blocks, and make the bank of a window."""
        (window,) = kernel
        blocks = torch.empty(self.blocks_shape, dtype=self.dtype, device=self.device)
        launch, maps = self.find_pack(maps, self._pack_launch)
        launch.run(maps, blocks, maps)
        bank = blocks.new_empty(self.bank_shape)
        self._bank_of_window.run(window.contiguous(), bank)
        return blocks, bank, None

    def _pack_launch(self, maps: Tensor) -> Launch:
        return self.copy_launch(maps.stride(), (1, 1), unpack=False, sums=False)

    def gradients_of_kernel(
        self, partial_sums: Tensor, sums: Tensor, *kernel: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the bias (C) and the window (C, 1, R, S)."""
        (window,) = kernel
        gradient = torch.empty_like(window, memory_format=torch.contiguous_format)
        grad_bias = partial_sums.new_empty(self.channels)
        self._gradient_of_window.run(partial_sums, sums, gradient, grad_bias)
        return grad_bias, gradient

    def window_by_torch(self, *kernel: Tensor) -> Tensor:
        """Return the window itself."""
        (window,) = kernel
        return window


def max_offset(maps: Tensor) -> int:
    """Return the offset of an image's last number, or of the next image if that is larger."""
    image_stride, *strides = maps.stride()
    last = 0
    for size, stride in zip(maps.shape[1:], strides, strict=True):
        last += (size - 1) * stride
    return max(last, image_stride)
