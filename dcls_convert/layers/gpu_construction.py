"""Bilinear elements of 2-D kernels on a GPU, by the launches of `element_kernels`.

- `construct_windows` makes kernels of any convolution, in one launch.
- An `ElementPlan` convolves depthwise in blocks. It never makes windows: the bank is made from the
  elements, and their gradients from the bank's.

Layers clamp their positions in place in every forward pass, so positions must not be saved for
backward. The kernels write clamped copies, and these are saved.

Axes: *C kernels, E elements, R x S the window. This module needs Triton.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..depthwise import block_kernels
from ..depthwise.block_plan import BlockPlan
from ..depthwise.blocks import add, gradients_by_torch, is_on_another_gpu, needs_torch
from ..depthwise.launching import Launch
from ..geometry import Pair, ceil_div
from ..depthwise import element_kernels as kernels
from .bilinear_plain import construct_by_broadcasting, per_axis

_WINDOW_CELLS: int = kernels.WINDOW_CELLS.value
_ELEMENTS: int = kernels.ELEMENTS.value
_ELEMENTS_OF_BANK: int = block_kernels.GATHERED.value
_CHANNELS: int = block_kernels.PACK_CHANNELS.value


class ElementPlan(BlockPlan):
    """A plan whose bank is made of elements: weight (C, 1, E) and positions (2, C, 1, E).

    Args:
        elements: Number of elements of a kernel.
        clamps: Whether positions are clamped in place, too.
        maps, window, stride, dtype, has_bias, output_dtype: See `BlockPlan`.
    """

    def __init__(
        self,
        maps: Tensor,
        window: Pair,
        stride: Pair,
        dtype: torch.dtype,
        *,
        has_bias: bool,
        output_dtype: torch.dtype | None,
        elements: int,
        clamps: bool,
    ) -> None:
        super().__init__(maps, window, stride, dtype, has_bias=has_bias, output_dtype=output_dtype)
        self._elements = elements
        self._clamps = clamps
        self._element_gradients = Launch(
            kernels.element_gradients_of_bank,
            (self.channels, ceil_div(elements, _ELEMENTS_OF_BANK), 1),
            (self.channels, elements, self.parts, self.blocks, *self.tap_sizes),
            (*window, has_bias),
        )

    def pack_with_bank(self, maps: Tensor, *kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Copy maps into blocks, and make the bank; also returns clamped positions."""
        weight, positions = kernel
        packed = torch.empty(self.blocks_shape, dtype=self.dtype, device=self.device)
        bank = packed.new_empty(self.bank_shape)
        positions = positions.contiguous()
        clamped = torch.empty_like(positions)
        launch, maps = self.find_pack(maps, self._pack_and_make_bank)
        launch.run(maps, packed, weight.contiguous(), positions, clamped, bank)
        return packed, bank, clamped

    def _pack_and_make_bank(self, maps: Tensor) -> Launch:
        sizes, layout = self.layout_of(maps.stride())
        programs = self.blocks + self.taps * _CHANNELS
        return Launch(
            kernels.pack_and_make_bank,
            (programs, ceil_div(self.channels, _CHANNELS), 1),
            (*sizes, *self.tap_sizes, self._elements),
            (*layout, *self.window, self._clamps),
        )

    def gradients_of_kernel(
        self, partial_sums: Tensor, sums: Tensor, *kernel: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of bias (C), weight and positions."""
        weight, clamped = kernel
        weight = weight.contiguous()
        grad_weight = torch.empty_like(weight)
        grad_positions = torch.empty_like(clamped)
        grad_bias = partial_sums.new_empty(self.channels)
        self._element_gradients.run(
            weight, clamped, partial_sums, sums, grad_weight, grad_positions, grad_bias
        )
        return grad_bias, grad_weight, grad_positions

    def window_by_torch(self, *kernel: Tensor) -> Tensor:
        """Construct the windows (C, 1, R, S) by torch's operations."""
        weight, positions = kernel
        return _construct_by_torch(weight.to(torch.float32), positions, self.window)


def construct_windows(weight: Tensor, positions: Tensor, size: Pair) -> Tensor:
    """Construct kernels: weight (*C, E), positions (2, *C, E) -> (*C, R, S), of weight's dtype.

    Positions are in cells from the centre. The sides of the window must be longer than one cell.
    """
    if is_on_another_gpu(weight):
        with torch.cuda.device(weight.device):
            return construct_windows(weight, positions, size)
    return cast(Tensor, _Construction.apply(weight, positions, size)[0])


class _Construction(Function):
    """weight (*C, E), positions (2, *C, E) -> windows (*C, R, S), clamped positions.

    An output that is saved keeps the graph, for gradients of gradients.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
        ctx.size = size
        ctx.set_materialize_grads(False)
        weight_with_graph = weight  # for gradients of gradients
        weight = weight.contiguous()
        positions = positions.contiguous()
        windows = torch.empty((*weight.shape[:-1], *size), dtype=weight.dtype, device=weight.device)
        clamped = torch.empty_like(positions)
        elements = weight.shape[-1]
        count = weight.numel() // elements
        cells = 1 << (size[0] * size[1] - 1).bit_length()  # a power of 2
        at_once = max(1, _WINDOW_CELLS // cells)
        _launch(
            kernels.construct,
            ceil_div(count, at_once),
            (count, elements),
            (*size, cells, at_once),
            (weight, positions, windows, clamped),
        )
        ctx.save_for_backward(weight_with_graph, clamped)
        return windows, clamped

    @staticmethod
    def backward(
        ctx: Any, grad_windows: Tensor | None, grad_clamped: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_windows is None:
            return None, grad_clamped, None
        weight, clamped = ctx.saved_tensors
        size = ctx.size
        grad_weight: Tensor | None
        grad_positions: Tensor | None
        if needs_torch(grad_windows):
            grad_weight, grad_positions = gradients_by_torch(
                partial(_construct_by_torch, size=size),
                (weight, clamped),
                grad_windows,
            )
        else:
            weight = weight.contiguous()
            grad_weight = torch.empty_like(weight)
            grad_positions = torch.empty_like(clamped)
            elements = weight.shape[-1]
            _launch(
                kernels.element_gradients_of_windows,
                ceil_div(weight.numel(), _ELEMENTS),
                (weight.numel() // elements, elements),
                size,
                (weight, clamped, grad_windows.contiguous(), grad_weight, grad_positions),
            )
        return grad_weight, add(grad_positions, grad_clamped), None


# Launches, by all that they depend on. Layers bound their number, images of new sizes add none.
_launches: dict[tuple[object, ...], Launch] = {}


def _launch(
    kernel: Any,
    programs: int,
    sizes: tuple[int, ...],
    constants: tuple[int, ...],
    tensors: Sequence[Tensor],
) -> None:
    grid = (programs, 1, 1)
    if torch.compiler.is_compiling():
        Launch(kernel, grid, sizes, constants).run(*tensors)
        return
    key = (kernel, sizes, constants, tensors[0].device, *[tensor.dtype for tensor in tensors])
    if key not in _launches:
        _launches[key] = Launch(kernel, grid, sizes, constants)
    _launches[key].run(*tensors)


def _construct_by_torch(weight: Tensor, positions: Tensor, size: Pair) -> Tensor:
    """Construct windows as the kernels do, by torch's operations."""
    cells = positions.to(torch.float32) + per_axis([side // 2 for side in size], positions)
    return construct_by_broadcasting(weight.to(torch.float32), cells, size).to(weight.dtype)
