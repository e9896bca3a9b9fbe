"""The cells in which a kernel is fitted: the old kernel's extent, and how an element spreads in it.

Axes: L layers, O output channels, I input channels per group, D cells of the dense axes, K cells of the old kernel
along the learnt axes, E elements, A learnt axes. A line is one kernel along the learnt axes, of N = O * I * D; a box
has S cells.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.elements import cells_last
from ..layers.geometry import extent, grid_positions
from ..layers.interpolation import find_interpolation, learnt_axes

SPREAD_MARGIN = 3  # cells: six sigma of a Gaussian element as it starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An old kernel's extent along the learnt axes, with a margin where elements spread beyond their neighbours."""

    axes: tuple[int, ...]  # the learnt ones among the spatial axes
    sides: tuple[int, ...]  # in cells, of each learnt axis
    origin: tuple[int, ...]  # of the first cell, from the window's centre
    kernel_size: tuple[int, ...]  # of the old kernel along the learnt axes
    spacing: tuple[int, ...]  # of its cells
    interpolation: str

    def cells(self) -> Tensor:
        """(K, A): where the cells of the old kernel lie in the box."""
        shapes = zip(self.sides, self.kernel_size, self.spacing, strict=True)
        ranges = [
            range((side - extent(size, step)) // 2, (side + extent(size, step)) // 2, step)
            for side, size, step in shapes
        ]
        return torch.tensor(list(itertools.product(*ranges)))

    def lines_of(self, kernel: Tensor) -> Tensor:
        """(O, I, *kernel size) -> (N, S), zero where the old kernel has no cell; at least in float32."""
        values = cells_last(kernel, self.axes).flatten(0, -2)  # (N, K)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        boxed = values.new_zeros(len(values), math.prod(self.sides))
        strides = [math.prod(self.sides[axis + 1 :]) for axis in range(len(self.sides))]
        boxed[:, (self.cells() * torch.tensor(strides)).sum(1).to(values.device)] = values
        return boxed

    def profile(self, places: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """How an element spreads along an axis, and the derivative by its place: (N, E) -> (N, E, side) each."""
        return find_interpolation(self.interpolation).footprint(places, side)

    def kernels(self, places: Tensor, weights: Tensor) -> Tensor:
        """Places (N, E, A) and weights (N, L, E) -> (N, L, S)."""
        flat = places.new_ones(*places.shape[:2], 1)
        for axis, side in enumerate(self.sides):
            flat = (flat.unsqueeze(-1) * self.profile(places[..., axis], side)[0].unsqueeze(-2)).flatten(-2)
        return weights @ flat


def box_of(
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
    interpolation: str,
    dense_axes: Sequence[int] = (),
) -> Box:
    """The box of an old kernel in a window of that size."""
    axes = learnt_axes(len(size), dense_axes)
    margins = []
    for axis in axes:
        spare = (size[axis] - extent(kernel_size[axis], dilation[axis])) // 2
        margins.append(0 if find_interpolation(interpolation).exact_on_cells else min(SPREAD_MARGIN, spare))
    extents = [extent(kernel_size[axis], dilation[axis]) for axis in axes]
    firsts = [grid_positions(kernel_size[axis], dilation[axis], size[axis])[0] for axis in axes]
    return Box(
        axes=tuple(axes),
        sides=tuple(side + 2 * margin for side, margin in zip(extents, margins, strict=True)),
        origin=tuple(first - margin for first, margin in zip(firsts, margins, strict=True)),
        kernel_size=tuple(kernel_size[axis] for axis in axes),
        spacing=tuple(dilation[axis] for axis in axes),
        interpolation=interpolation,
    )
