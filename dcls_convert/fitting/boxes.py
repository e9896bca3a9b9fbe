"""The cells in which a kernel is fitted: the old kernel's extent, and how an element spreads in it.

Axes: L layers, O output channels, I input channels per group, D cells of the dense axes, K cells of the old kernel
along the learnt axes, E elements, A learnt axes. A line is one kernel along the learnt axes, of N = O * I * D; a box
has S cells.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..depthwise.geometry import extent, grid_positions
from ..layers.elements import cells_last, largest_elements
from ..layers.interpolation import find_interpolation, learnt_axes

SPREAD_MARGIN = 3  # cells: six sigma of a Gaussian element as it starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """An old kernel's extent along the learnt axes, with a margin where elements spread beyond their neighbours."""

    dilation: tuple[int, ...]  # of the old convolution, and what it becomes
    size: tuple[int, ...]
    interpolation: str
    dense_axes: tuple[int, ...]
    axes: tuple[int, ...]  # the learnt ones among the spatial axes
    sides: tuple[int, ...]  # in cells, of each learnt axis
    origin: tuple[int, ...]  # of the first cell, from the window's centre
    kernel_size: tuple[int, ...]  # of the old kernel along the learnt axes
    spacing: tuple[int, ...]  # of its cells

    def largest(
        self, kernels: Sequence[Tensor], kernel_count: int, *, effective: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """As `largest_elements`."""
        kept = {"dilation": self.dilation, "size": self.size, "dense_axes": self.dense_axes}
        return largest_elements(kernels, kernel_count=kernel_count, effective=effective, **kept)

    def cells(self) -> Tensor:
        """(K, A): where the cells of the old kernel lie in the box."""
        shapes = zip(self.kernel_size, self.spacing, self.sides, strict=True)
        ranges = [[cell + side // 2 for cell in grid_positions(size, step, side)] for size, step, side in shapes]
        return torch.tensor(list(itertools.product(*ranges)))

    def flat_cells(self) -> Tensor:
        """(K,): which of the box's S cells they are."""
        strides = [math.prod(self.sides[axis + 1 :]) for axis in range(len(self.sides))]
        return (self.cells() * torch.tensor(strides)).sum(1)

    def lines_of(self, kernel: Tensor) -> Tensor:
        """(O, I, *kernel size) -> (N, S), zero where the old kernel has no cell; at least in float32."""
        values = cells_last(kernel, self.axes).flatten(0, -2)  # (N, K)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        boxed = values.new_zeros(len(values), math.prod(self.sides))
        boxed[:, self.flat_cells().to(values.device)] = values
        return boxed

    def profile(self, places: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """How an element spreads along an axis, and the derivative by its place: (N, E) -> (N, E, side) each."""
        return find_interpolation(self.interpolation).footprint(places, side)

    def footprint(self, places: Tensor) -> Tensor:
        """(N, E, A) -> (N, E, S)."""
        return spread([self.profile(places[..., axis], side)[0] for axis, side in enumerate(self.sides)])

    def places_of(self, positions: Tensor) -> Tensor:
        """(A, O, I, *D, E) from the window's centre -> (N, E, A), from the first cell of the box."""
        places = positions.flatten(1, -2).movedim(0, -1)
        return places - places.new_tensor(self.origin)


def box_of(
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
    interpolation: str,
    dense_axes: Sequence[int] = (),
) -> Box:
    """The box of an old kernel in a window of that size."""
    axes = learnt_axes(len(size), dense_axes)
    old, spacing, window = ([values[axis] for axis in axes] for values in (kernel_size, dilation, size))
    extents = list(map(extent, old, spacing))
    most = 0 if find_interpolation(interpolation).exact_on_cells else SPREAD_MARGIN
    margins = [min(most, (side - inner) // 2) for side, inner in zip(window, extents, strict=True)]
    firsts = [cells[0] for cells in map(grid_positions, old, spacing, window)]
    return Box(
        dilation=tuple(dilation),
        size=tuple(size),
        interpolation=interpolation,
        dense_axes=tuple(dense_axes),
        axes=tuple(axes),
        sides=tuple(side + 2 * margin for side, margin in zip(extents, margins, strict=True)),
        origin=tuple(first - margin for first, margin in zip(firsts, margins, strict=True)),
        kernel_size=tuple(old),
        spacing=tuple(spacing),
    )


def spread(profiles: Sequence[Tensor]) -> Tensor:
    """How elements spread over a box, from their profiles along its axes: (N, E, side) each -> (N, E, S)."""
    return functools.reduce(lambda flat, other: (flat.unsqueeze(-1) * other.unsqueeze(-2)).flatten(-2), profiles)
