"""How far the cells of a map see into an earlier map, and where cells of a map come from.

Plain values: sizes and numbers of cells, no tensors of a network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What the cells of a map see of an earlier map, the origin, along one axis.

    Cell i sees the origin's cells from `step * i + first` to `step * i + last`.
    """

    origin: int  # a number for each origin
    size: int  # number of the origin's cells
    first: int = 0
    last: int = 0
    step: int = 1
    # Cells of the origin by which code other than convolutions moves the map: on the path with the
    # largest shift, and on that with the smallest.
    shift: int = 0
    least_shift: int = 0
    convs: frozenset[tuple[str, int]] = frozenset()  # those on the way, with their axis

    def moved(self, before: int, step: int) -> "Reach":
        """Return the reach of the map whose cell i is cell `step * i - before` of this map."""
        cells = self.step * before
        return replace(
            self,
            first=self.first - cells,
            last=self.last - cells,
            step=self.step * step,
            shift=self.shift + cells,
            least_shift=self.least_shift + cells,
        )

    def through(self, conv: tuple[str, int], before: int, extent: int, stride: int) -> "Reach":
        """Return the reach of the output of a convolution, padded by `before` cells."""
        return replace(self.over_windows(before, extent, stride), convs=self.convs | {conv})

    def over_windows(self, before: int, extent: int, step: int) -> "Reach":
        """Return the reach of cells that each see a window, of a map padded by `before` cells."""
        return replace(
            self,
            first=self.first - self.step * before,
            last=self.last + self.step * (extent - 1 - before),
            step=self.step * step,
        )

    def with_path(self, other: "Reach") -> "Reach":
        """Return the reach over two paths from the same origin."""
        return replace(
            self,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            shift=max(self.shift, other.shift, key=abs),
            least_shift=min(self.least_shift, other.least_shift, key=abs),
            convs=self.convs | other.convs,
        )

    def looks_one_way(self, size: int) -> bool:
        """True if a shift makes all cells see nothing after, or nothing before, their own place.

        Args:
            size: Number of cells of the map.
        """
        if self.shift == 0:
            return False
        places = self._places(size)
        if self.first == self.last:
            return self.last < min(places) or self.first > max(places)
        return self.last <= min(places) or self.first >= max(places)

    def is_off_centre(self, size: int) -> bool:
        """True if, on all paths, a shift moves what cells see away from their own place."""
        if self.least_shift == 0:
            return False
        middle = (self.first + self.last) / 2
        return all(abs(middle - place) >= 1 for place in self._places(size))

    def _places(self, size: int) -> tuple[float, float, float]:
        """Return where cell 0 may lie in the origin, in its cells.

        A map of another size than the origin may lie at its start, its middle or its end.
        """
        missing = self.size - size * self.step
        return 0, math.trunc(missing / 2) + (self.step - 1) / 2, max(missing, 0)


@dataclass(frozen=True, slots=True)
class Source:
    """Where an axis comes from: its cell i is cell `step * i - before` of an axis of the input.

    With an `extent`, the cell is computed from that one and those after it, so many together.
    """

    axis: int
    before: int = 0
    step: int = 1
    extent: int = 1


Sources = list[Source | None]  # for each axis of the output; None if it is mixed from many cells


def sources_of_pad(dims: int, pad: Sequence[int]) -> Sources:
    """Return the sources of `F.pad`, whose widths begin with the last axis."""
    sources: Sources = [Source(axis) for axis in range(dims)]
    for index, before in enumerate(pad[::2]):
        axis = dims - 1 - index
        sources[axis] = Source(axis, before)
    return sources


def sources_of_roll(shape: Sequence[int], shifts: Any, axes: Any) -> Sources:
    """Return the sources of `torch.roll`; the cells that come in at the other end do not count."""
    if isinstance(shifts, int):
        shifts = [shifts]
    if isinstance(axes, int):
        axes = [axes]
    if not axes:  # rolled as one long row
        return [None] * len(shape)
    cells_of = [0] * len(shape)
    for axis, shift in zip(axes, shifts, strict=True):
        cells_of[axis] += shift
    sources: Sources = []
    for axis, cells in enumerate(cells_of):
        forward = cells % max(shape[axis], 1)
        if forward > shape[axis] // 2:
            forward -= shape[axis]
        sources.append(Source(axis, forward))
    return sources


def sources_of_index(shape: Sequence[int], index: Any) -> Sources | None:
    """Return the sources of `map[index]` for integers, slices, None and an ellipsis; else None."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(item, int | slice | type(None) | type(...)) for item in items):
        return None
    used = sum(isinstance(item, int | slice) for item in items)
    if ... not in items:
        items.append(...)
    place = items.index(...)
    items[place : place + 1] = [slice(None)] * (len(shape) - used)
    sources: Sources = []
    axis = 0
    for item in items:
        if item is None:
            sources.append(None)
            continue
        if isinstance(item, slice):
            start, _, step = item.indices(shape[axis])
            sources.append(Source(axis, -start, step))
        axis += 1
    return sources


def sources_of_permutation(permute: Any, dims: int) -> Sources:
    """Return the sources of a function that permutes the axes of a tensor of `dims` axes."""
    probe: Tensor = permute(torch.empty(tuple(range(1, dims + 1)), device="meta"))
    return [Source(side - 1) for side in probe.shape]


def sources_by_size(old: Sequence[int], new: Sequence[int]) -> Sources:
    """Return the sources of a reshape, or of a function that treats each cell for itself.

    If the number of cells is the same, axes of equal size at either end are the same axes. If not,
    as in broadcasting, axes are matched from the end, and those of equal size are the same.
    """
    sources: Sources = [None] * len(new)
    if math.prod(old) != math.prod(new):
        for axis in range(-min(len(old), len(new)), 0):
            if old[axis] == new[axis]:
                sources[axis] = Source(len(old) + axis)
        return sources
    shorter = min(len(old), len(new))
    leading = 0
    while leading < shorter and old[leading] == new[leading]:
        sources[leading] = Source(leading)
        leading += 1
    for axis in range(-1, leading - shorter - 1, -1):
        if old[axis] != new[axis]:
            break
        sources[axis] = Source(len(old) + axis)
    return sources
