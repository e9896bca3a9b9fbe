"""How maps of one shape are convolved in blocks: sizes, and the launches of the kernels.

The top of `block_kernels` explains blocks, taps and the bank, with drawings.

Axes: N images, C channels, H x W a map, R x S the window, E elements, M blocks of all images.

This module needs Triton.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..geometry import Pair, ceil_div
from . import block_kernels, element_kernels
from .devices import adds_three_taps, float32_precision
from .launching import LOAD_BYTES, Launch, NewTensor, Pass, Workspace
from .layouts import BLOCK_SIDE, MAX_OFFSET, is_channels_last

Launches = list[tuple[Launch, Sequence[str]]]  # with the names of tensors

_CELLS: int = block_kernels.CELLS.value  # of a block
_CHANNELS: int = block_kernels.PACK_CHANNELS.value
# If there are fewer programs than this, the bank's gradient is summed in parts, to keep a large GPU
# busy.
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
# Stages of a pipelined loop of products. They fill at most 72 KB of shared memory (of 99 KB or
# more), or 96 KB where three taps are added at once (of 227 KB).
STAGES = 3


class BlockPlan:
    """How maps of one shape are convolved on one device; the plan keeps its passes.

    The bank is made of elements: weight (C, 1, E) and positions (2, C, 1, E). Or weight is windows
    (C, 1, R, S); positions are then any tensor, and neither they nor their gradients are written.

    Without a bias or sums, Triton kernels still take a tensor as a placeholder, and ignore it.

    Args:
        maps: The input (N, C, H, W), or a tensor of the same shape, memory format, dtype and
            device. The output and the input's gradient have this memory format.
        window: (R, S), both odd.
        stride: 1 or 2 along each axis.
        dtype: The dtype of the blocks and of the output: bfloat16, float16 or float32.
        has_bias: Whether a bias is added.
        elements: Number of elements of a kernel; None if weight is windows.
        positions_dtype: The dtype of positions.
        window_by_torch: Makes windows of elements by torch's operations, which can be
            differentiated twice.
    """

    def __init__(
        self,
        maps: Tensor,
        window: Pair,
        stride: Pair,
        dtype: torch.dtype,
        *,
        has_bias: bool,
        elements: int | None = None,
        positions_dtype: torch.dtype = torch.float32,
        window_by_torch: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        images, channels, rows, columns = maps.shape
        block_rows = ceil_div(rows, BLOCK_SIDE)
        block_columns = ceil_div(columns, BLOCK_SIDE)
        blocks = images * block_rows * block_columns
        # The number of blocks that an output depends on along each axis, within the map's blocks.
        taps_down = 2 * min(ceil_div(window[0] // 2, BLOCK_SIDE), block_rows - 1) + 1
        taps_across = 2 * min(ceil_div(window[1] // 2, BLOCK_SIDE), block_columns - 1) + 1
        self.is_traced = torch.compiler.is_compiling()  # if so, the plan is for this graph alone
        self.dtype = dtype
        self.device = maps.device
        self.window = window
        self.stride = stride
        self.has_bias = has_bias
        self.of_windows = elements is None
        self.elements = elements or window[0] * window[1]
        self.window_by_torch = window_by_torch or (lambda weight, positions: weight)
        self.channels = channels
        self.blocks = blocks
        self.taps = taps_down * taps_across
        # Sizes in the order in which Triton kernels take them.
        self.map_sizes = (rows, columns, block_rows, block_columns, blocks)
        self.tap_sizes = (taps_down, taps_across)
        self.product_sizes = (blocks, block_rows, block_columns, taps_down, taps_across)
        self.precision = "ieee"  # of products; of no effect for 16 bits
        if dtype == torch.float32:
            self.precision = float32_precision()
        self.channels_last = is_channels_last(maps)
        self._memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        output_size = (ceil_div(rows, stride[0]), ceil_div(columns, stride[1]))
        self.input = self._new_maps((images, channels, rows, columns), maps.dtype)
        self.output = self._new_maps((images, channels, *output_size), dtype)
        self._blocks = self._new(channels, blocks, _CELLS)
        shape = (1,) if self.of_windows else (2, channels, 1, self.elements)
        # What the backward pass needs: blocks of the input, the bank, and clamped positions, as
        # positions may change before it.
        self._saved = {
            "blocks": self._blocks,
            "bank": self._new(channels, self.taps, _CELLS, _CELLS),
            "clamped": self._new(*shape, dtype=positions_dtype),
        }
        self.saved = Workspace(
            dtype, maps.device, *[{name: new} for name, new in self._saved.items()]
        )
        self._passes: dict[tuple[object, ...], Pass] = {}

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> NewTensor:
        return NewTensor.contiguous(shape, dtype or self.dtype, self.device)

    def _new_maps(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> NewTensor:
        _, channels, rows, columns = shape
        strides = (channels * rows * columns, rows * columns, columns, 1)
        if self.channels_last:
            strides = (channels * rows * columns, 1, columns * channels, channels)
        return NewTensor(shape, strides, dtype, self.device)

    def convolve(
        self, maps: Tensor, bias: Tensor | None, weight: Tensor, positions: Tensor, *, saves: bool
    ) -> list[Tensor]:
        """Convolve: (N, C, H, W) -> (N, C, H', W').

        If `saves`, also return what the backward pass needs: `saved`, or its parts under
        torch.compile, whose programs allocate memory in their own way.
        """
        launches, maps = self._find_pass(maps, self._forward, saves)
        weight = weight.contiguous()
        positions = positions.contiguous()
        if bias is None:
            return launches.run(maps, weight, positions)
        return launches.run(maps, weight, positions, bias.contiguous())

    def gradients(
        self,
        gradient: Tensor,
        weight: Tensor,
        saved: Sequence[Tensor],
        *,
        of_maps: bool,
        of_kernel: bool,
    ) -> list[Tensor]:
        """Return gradients, computed from the output's gradient.

        If `of_maps`, the first is the gradient of the maps. If `of_kernel`, the gradients of bias,
        weight and positions follow.
        """
        launches, gradient = self._find_pass(
            gradient, self._backward, of_maps, of_kernel, weight.dtype
        )
        return launches.run(gradient, weight.contiguous(), *saved)

    def _find_pass(
        self, maps: Tensor, make: Callable[..., Pass], *options: object
    ) -> tuple[Pass, Tensor]:
        """Return the pass that packs these maps, kept from an earlier call or new, and the maps.

        The maps are copied if they begin at a wrong address or their rows are too far apart.
        """
        if torch.compiler.is_compiling():
            maps = self._packable(maps)
            return make(maps.stride(), *options), maps
        # Maps that must be copied are never found.
        offset = maps.data_ptr() % LOAD_BYTES
        key = (maps.stride(), offset, maps.dtype, *options)
        found = self._passes.get(key)
        if found is None:
            packable = self._packable(maps)
            if packable is not maps:
                return self._find_pass(packable, make, *options)
            found = self._passes[key] = make(maps.stride(), *options)
        return found, maps

    def _packable(self, maps: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and maps.data_ptr() % LOAD_BYTES:
            maps = maps.clone()
        if max_offset(maps) >= MAX_OFFSET:  # a part of a much larger tensor
            maps = maps.clone(memory_format=self._memory_format)
        return maps

    def _forward(self, strides: Sequence[int], saves: bool) -> Pass:
        """Pack the maps and make the bank, convolve, and unpack."""
        given = ["maps", "weight", "positions"]
        results: dict[str, NewTensor | Workspace] = {"output": self.output}
        scratch = [{"convolved": self._blocks}]
        if not saves:
            scratch += [{name: new} for name, new in self._saved.items()]
        elif self.is_traced:
            results |= self._saved
        else:
            results["saved"] = self.saved
        bias = "blocks"  # a placeholder, if there is no bias
        if self.has_bias:
            bias = "bias"
            given.append(bias)
        made_of = ("maps", "blocks", "weight", "positions", "clamped", "bank")
        launches: Launches = [
            (self._pack_and_make_bank(strides), made_of),
            (self._product(self.has_bias, False), ("blocks", "bank", bias, "convolved")),
            (self._unpack(self.output, self.stride), ("output", "convolved", "convolved")),
        ]
        return Pass(given, results, launches, Workspace(torch.uint8, self.device, *scratch))

    def _backward(
        self, strides: Sequence[int], of_maps: bool, of_kernel: bool, weight_dtype: torch.dtype
    ) -> Pass:
        """Pack the output's gradient, and compute the gradients that are asked for."""
        saved: list[str | Workspace] = [*self._saved] if self.is_traced else [self.saved]
        results: dict[str, NewTensor | Workspace] = {}
        scratch = [{"gradients": self._blocks}]
        later: dict[str, NewTensor] = {}
        sums = "gradient"  # a placeholder, if there are no sums
        has_sums = self.has_bias and of_kernel
        if has_sums:
            sums = "sums"
            scratch.append({sums: self._new(self.channels, self.blocks, dtype=torch.float32)})
        pack = self._copy(strides, self.stride, unpack=False, sums=has_sums)
        launches: Launches = [(pack, ("gradient", "gradients", sums))]
        if of_maps:
            results["grad_maps"] = self.input
            later["convolved"] = self._blocks
            launches += [
                (self._product(False, True), ("gradients", "bank", "gradients", "convolved")),
                (self._unpack(self.input, (1, 1)), ("grad_maps", "convolved", "convolved")),
            ]
        if of_kernel:
            results["grad_bias"] = self._new(self.channels, dtype=torch.float32)
            shape = self.window if self.of_windows else (self.elements,)
            results["grad_weight"] = self._new(self.channels, 1, *shape, dtype=weight_dtype)
            results["grad_positions"] = self._saved["clamped"]
            of_bank, of_elements, parts = self._gradients_of_kernel()
            bank = self._saved["bank"].shape
            later["partial_sums"] = self._new(parts, *bank, dtype=torch.float32)
            written = ("grad_weight", "grad_positions", "grad_bias")
            launches += [
                (of_bank, ("blocks", "gradients", "partial_sums")),
                (of_elements, ("weight", "clamped", "partial_sums", sums, *written)),
            ]
        scratch.append(later)
        given = ["gradient", "weight", *saved]
        return Pass(given, results, launches, Workspace(torch.uint8, self.device, *scratch))

    def _pack_and_make_bank(self, strides: Sequence[int]) -> Launch:
        sizes, layout = self._layout_of(strides)
        programs = self.blocks + self.taps * _CHANNELS
        return Launch(
            element_kernels.pack_and_make_bank,
            (programs, ceil_div(self.channels, _CHANNELS), 1),
            (*sizes, *self.tap_sizes, self.elements),
            (*layout, *self.window, self.of_windows),
        )

    def _unpack(self, maps: NewTensor, steps: Pair) -> Launch:
        return self._copy(maps.strides, steps, unpack=True, sums=False)

    def _copy(self, strides: Sequence[int], steps: Pair, *, unpack: bool, sums: bool) -> Launch:
        sizes, layout = self._layout_of(strides)
        grid = (self.blocks, ceil_div(self.channels, _CHANNELS), 1)
        return Launch(block_kernels.pack, grid, sizes, (*steps, *layout, unpack, sums))

    def _layout_of(self, strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int | bool, ...]]:
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

    def _product(self, has_bias: bool, turned: bool) -> Launch:
        size = self.dtype.itemsize
        return Launch(
            block_kernels.convolve_blocks,
            (ceil_div(self.blocks, BLOCKS_AT_ONCE[size]), self.channels, 1),
            self.product_sizes,
            (has_bias, turned, self.precision, BLOCKS_AT_ONCE[size], STEP[size]),
            warps=WARPS[size],
            stages=STAGES,
        )

    def _gradients_of_kernel(self) -> tuple[Launch, Launch, int]:
        """Return the launches for the gradients of the bank and of elements.

        Also return the number of parts in which the bank's gradient is summed.
        """
        step = STEP[self.dtype.itemsize]
        taps_down, taps_across = self.tap_sizes
        three = taps_across == 3 and self.dtype.itemsize == 2 and adds_three_taps(self.device)
        programs = taps_down if three else self.taps
        parts = ceil_div(MIN_PROGRAMS, self.channels * programs)
        parts = max(1, min(parts, self.blocks // MIN_BLOCKS_IN_PART))
        blocks_in_part = ceil_div(ceil_div(self.blocks, parts), step) * step
        of_bank = Launch(
            block_kernels.gradient_of_bank,
            (programs, self.channels, parts),
            (self.channels, blocks_in_part, *self.product_sizes),
            (self.precision, step, three),
            warps=GRADIENT_WARPS,
            stages=STAGES,
        )
        of_elements = Launch(
            element_kernels.element_gradients_of_bank,
            (self.channels, ceil_div(self.elements, block_kernels.GATHERED.value), 1),
            (self.channels, self.elements, parts, self.blocks, *self.tap_sizes),
            (*self.window, self.has_bias, self.of_windows),
        )
        return of_bank, of_elements, parts


def max_offset(maps: Tensor) -> int:
    """Return the offset of an image's last number, or of the next image if that is larger."""
    image_stride, *strides = maps.stride()
    last = 0
    for size, stride in zip(maps.shape[1:], strides, strict=True):
        last += (size - 1) * stride
    return max(last, image_stride)
