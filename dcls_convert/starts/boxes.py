"""The box within which a kernel is fitted, and how elements spread over its cells.

Positions count cells from the centre of the window, box positions from the first cell of the box.

Axes: L layers, O output channels, I input channels per group, D cells of the dense axes,
N = O * I * D kernel lines (see `layers/elements.py`), K cells of the old kernel along the learnt
axes, S cells of the box, E elements, A learnt axes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..geometry import (
    Grow,
    along_learnt_axes,
    extent,
    grid_positions,
    grow_of_axes,
    learnt_axes,
    new_cells,
)
from ..layers.elements import cells_last, largest_elements
from ..layers.interpolation import find_interpolation
from ..layers.profiles import normalised_profile
from ..planning.layer_plan import LayerPlan


class _BoxAxis(NamedTuple):
    """One learnt axis of a box."""

    length: int  # in cells
    old_cells: slice  # the box cells that the old kernel has
    origin: int  # position of the box's first cell, from the window's centre
    # Elements are fitted between these box positions, where the box has all cells that they spread
    # to.
    lowest: int
    highest: int


def _box_axis(
    kernel_size: int, dilation: int, size: int, grow: Grow, wanted_margin: int
) -> _BoxAxis:
    """Return an axis of a box with `wanted_margin` cells on either side, or as many as there are.

    Elements are not placed in a whole margin: they would spread beyond the box. They may be placed
    in a smaller margin: it ends at the window's border, which cuts elements off in any case.
    """
    old_extent = extent(kernel_size, dilation)
    before, after = [min(wanted_margin, room) for room in new_cells(size, old_extent, grow)]
    length = before + old_extent + after
    return _BoxAxis(
        length=length,
        old_cells=slice(before, before + old_extent, dilation),
        origin=grid_positions(kernel_size, dilation, size, grow)[0] - before,
        lowest=before if before == wanted_margin else 0,
        highest=length - 1 - (after if after == wanted_margin else 0),
    )


class Box:
    """The old kernel's extent along the learnt axes, plus the cells that its elements spread to.

    The attributes `kernel_size`, `lengths`, `old_cells`, `origin`, `lowest` and `highest` have one
    entry for each learnt axis: see `_BoxAxis`.
    """

    def __init__(
        self,
        kernel_size: Sequence[int],
        dilation: Sequence[int],
        size: Sequence[int],
        interpolation: str,
        dense_axes: Sequence[int] = (),
        grow: Sequence[Grow] = (),
    ) -> None:
        self.dilation = dilation
        self.grow = grow_of_axes(grow, len(size))
        self.size = size
        self.dense_axes = dense_axes
        self.axes = learnt_axes(len(size), dense_axes)
        self.kernel_size = along_learnt_axes(kernel_size, dense_axes)
        self.interpolation = find_interpolation(interpolation)
        margin = self.interpolation.support - 1
        axes = []
        for i in self.axes:
            axes.append(_box_axis(kernel_size[i], dilation[i], size[i], self.grow[i], margin))
        self.old_cells = tuple(axis.old_cells for axis in axes)
        self.lengths = tuple(axis.length for axis in axes)
        self.origin = tuple(axis.origin for axis in axes)
        self.lowest = tuple(axis.lowest for axis in axes)
        self.highest = tuple(axis.highest for axis in axes)

    @classmethod
    def of(cls, layer: LayerPlan) -> Self:
        """Return the box of a planned layer; layers that share positions have the same."""
        return cls(
            layer.kernel_size,
            layer.dilation,
            layer.dilated_size,
            layer.interpolation,
            layer.dense_axes,
            layer.grow,
        )

    def largest_cells(
        self,
        kernels: Sequence[Tensor],
        kernel_count: int,
        *,
        effective: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Return the cells with the most energy over the layers, as elements.

        Args:
            kernels: (O, I, *kernel size) of each layer.
            kernel_count: Elements in each kernel.
            effective: The kernels that are convolved with, if they differ from `kernels`. Cells are
                chosen by the energy of `effective`.

        Returns:
            Weights (O, I, *D, E) of each layer, and the positions (A, O, I, *D, E).
        """
        return largest_elements(
            kernels,
            kernel_count=kernel_count,
            dilation=self.dilation,
            size=self.size,
            dense_axes=self.dense_axes,
            grow=self.grow,
            effective=effective,
        )

    def lines_of(self, kernel: Tensor) -> Tensor:
        """Return the lines (N, S) of a kernel (O, I, *kernel size), in float32 at least.

        Cells of the box where the old kernel has none are zero.
        """
        values = cells_last(kernel, self.axes).flatten(0, -2)  # (N, K)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        boxed = values.new_zeros(len(values), *self.lengths)
        boxed[:, *self.old_cells] = torch.unflatten(values, 1, self.kernel_size)
        return boxed.flatten(1)

    def footprint(self, box_positions: Tensor) -> Tensor:
        """Return how elements at box positions (N, E, A) spread over the box's cells: (N, E, S)."""
        lines, elements, _ = box_positions.shape
        footprint = box_positions.new_ones(lines, elements, 1)
        for axis, length in enumerate(self.lengths):
            profile = normalised_profile(self.interpolation, box_positions[..., axis], length)
            footprint = (footprint.unsqueeze(-1) * profile.unsqueeze(-2)).flatten(-2)
        return footprint

    def profiles(self, steps_per_cell: int) -> list[Tensor]:
        """Return how elements spread along each axis, at steps from `lowest` to `highest`.

        Each profile is repeated over the other axes, (steps, S), so that an element's footprint is
        the product of its profiles.
        """
        profiles = []
        for axis, length in enumerate(self.lengths):
            steps = torch.arange(1 + steps_per_cell * (self.highest[axis] - self.lowest[axis]))
            positions = self.lowest[axis] + steps.double() / steps_per_cell
            profile = normalised_profile(self.interpolation, positions, length)  # (steps, length)
            other_axes = [1] * len(self.lengths)
            other_axes[axis] = length
            profile = profile.reshape(-1, *other_axes).expand(-1, *self.lengths)
            profiles.append(profile.flatten(1))
        return profiles

    def to_box(self, positions: Tensor) -> Tensor:
        """Convert positions (A, O, I, *D, E) to box positions (N, E, A)."""
        by_line = positions.flatten(1, -2).movedim(0, -1)
        return by_line - by_line.new_tensor(self.origin)

    def from_box(self, box_positions: Tensor, shape: Sequence[int]) -> Tensor:
        """Convert box positions (N, E, A) to positions of shape (A, O, I, *D, E)."""
        by_line = box_positions + box_positions.new_tensor(self.origin)
        return by_line.movedim(-1, 0).reshape(shape)
