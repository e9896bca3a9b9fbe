"""The cells in which a kernel is fitted: the old kernel's extent, and how an element spreads in it.

Axes: L layers, O output channels, I input channels per group, D cells of the dense axes, K cells of
the old kernel along the learnt axes, E elements, A learnt axes. A line is one kernel along the
learnt axes, of N = O * I * D; a box has S cells.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..depthwise.geometry import extent, grid_positions
from ..layers.elements import cells_last, largest_elements
from ..layers.interpolation import find_interpolation, learnt_axes

SPREAD_MARGIN = 3  # cells: six sigma of a Gaussian element as it starts


class Box:
    """An old kernel's extent along the learnt axes, with a margin where elements spread beyond
    their neighbours."""

    def __init__(
        self,
        kernel_size: Sequence[int],
        dilation: Sequence[int],
        size: Sequence[int],
        interpolation: str,
        dense_axes: Sequence[int] = (),
    ) -> None:
        self.dilation, self.size, self.interpolation, self.dense_axes = (
            dilation,
            size,
            interpolation,
            dense_axes,
        )
        self.axes = learnt_axes(len(size), dense_axes)
        old, spacing, window = (
            [values[axis] for axis in self.axes] for values in (kernel_size, dilation, size)
        )
        method = find_interpolation(interpolation)
        # How an element spreads along an axis, and the derivative by its place: (N, E), side -> (N,
        # E, side) each.
        self.profile = method.footprint
        self.kernel_size = tuple(old)  # along the learnt axes, as all that follows
        # Where the old cells lie, from the window's centre.
        self.grids = list(map(grid_positions, old, spacing, window))
        extents = list(map(extent, old, spacing))
        most = 0 if method.exact_on_cells else SPREAD_MARGIN
        margins = [
            min(most, (side - inner) // 2) for side, inner in zip(window, extents, strict=True)
        ]
        self.sides = tuple(
            side + 2 * margin for side, margin in zip(extents, margins, strict=True)
        )  # in cells
        # Of the first cell, from the window's centre.
        self.origin = tuple(
            grid[0] - margin for grid, margin in zip(self.grids, margins, strict=True)
        )

    def largest(
        self,
        kernels: Sequence[Tensor],
        kernel_count: int,
        *,
        effective: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """As `largest_elements`."""
        kept = {"dilation": self.dilation, "size": self.size, "dense_axes": self.dense_axes}
        return largest_elements(kernels, kernel_count=kernel_count, effective=effective, **kept)

    def cells(self) -> Tensor:
        """(K, A): where the cells of the old kernel lie in the box."""
        return torch.tensor(list(itertools.product(*self.grids))) - torch.tensor(self.origin)

    def flat_cells(self) -> Tensor:
        """(K,): which of the box's S cells they are."""
        strides = [math.prod(self.sides[axis + 1 :]) for axis in range(len(self.sides))]
        return (self.cells() * torch.tensor(strides)).sum(1)

    def lines_of(self, kernel: Tensor) -> Tensor:
        """(O, I, *kernel size) -> (N, S), zero where the old kernel has no cell; at least in
        float32."""
        values = cells_last(kernel, self.axes).flatten(0, -2)  # (N, K)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        boxed = values.new_zeros(len(values), math.prod(self.sides))
        boxed[:, self.flat_cells().to(values.device)] = values
        return boxed

    def footprint(self, places: Tensor) -> Tensor:
        """(N, E, A) -> (N, E, S)."""
        return spread(
            [self.profile(places[..., axis], side)[0] for axis, side in enumerate(self.sides)]
        )

    def places_of(self, positions: Tensor) -> Tensor:
        """(A, O, I, *D, E) from the window's centre -> (N, E, A), from the first cell of the
        box."""
        places = positions.flatten(1, -2).movedim(0, -1)
        return places - places.new_tensor(self.origin)


def spread(profiles: Sequence[Tensor]) -> Tensor:
    """How elements spread over a box, from their profiles along its axes: (N, E, side) each -> (N,
    E, S)."""
    return functools.reduce(
        lambda flat, other: (flat.unsqueeze(-1) * other.unsqueeze(-2)).flatten(-2), profiles
    )
