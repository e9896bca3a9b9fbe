"""See to which sides the outputs of a network look: from the outputs that change with an input.

A causal network looks back alone; so do PixelCNNs along both axes, row by row. Every convolution
that is not centred on purpose shows in this way, however its maps were shifted.

Axes are compared as they are ordered: an output of the same axes as an input, in the same order,
may have other sizes, as after strides and crops.

For example, a kernel of 3 cells whose output is shifted by one: if cell 5 of the input changes,
cells 5 to 7 of the output do. So the output looks 2 cells back and 0 ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_CELLS = 4  # along an axis; with fewer, sides mean nothing
PLACES = (0.3, 0.5, 0.7)  # of the changed cells, one in each image of a batch
# A kernel that is centred but for its border looks nearly as far ahead as back. One-sided outputs
# look at least this many times as far to their side.
ONE_SIDED_RATIO = 2


def spatial_axes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the axes on which an input may have an order.

    The second axis has channels or, as in (N, time, channels), an order of its own.
    """
    if tensor.dim() < 2:
        return []
    axes: list[tuple[int, ...]] = [(1,)]
    if tensor.dim() > 2:
        axes.append(tuple(range(2, tensor.dim())))
    return [some for some in axes if max(tensor.shape[axis] for axis in some) >= MIN_CELLS]


def with_changed_cells(tensor: Tensor, axes: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """Change one cell of each image; return the cells, and the changed batches.

    There are several batches if one has fewer images than there are places.
    """
    cells = []
    batches = []
    for first in range(1 if len(tensor) >= len(PLACES) else len(PLACES)):
        changed = tensor.clone()
        for number, image in enumerate(changed):
            place = PLACES[(first + number) % len(PLACES)]
            cell = [int(place * tensor.shape[axis]) for axis in axes]
            index: list[Any] = [slice(None)] * image.dim()
            for axis, position in zip(axes, cell, strict=True):
                index[axis - 1] = position
            image[tuple(index)] = _other_values(image[tuple(index)], tensor)
            cells.append(cell)
        batches.append(changed)
    return cells, batches


def _other_values(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values of the same range as those of a tensor, but others."""
    if tensor.dtype == torch.bool:
        return ~values
    if not tensor.is_floating_point() and not tensor.is_complex():
        least = int(tensor.amin())
        most = int(tensor.amax())
        count = most - least + 1
        return (least + (values.long() - least + 1 + (most - least) // 2) % count).to(values)
    return -values - values.sgn()


def by_image(outputs: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Return outputs with an entry for each image, (N, ...), whatever the order of their axes.

    Images may be on the second axis, or on the first one together with time. Outputs of several
    times may be several tensors.
    """
    found = []
    for tensor in outputs:
        if tensor.dim() > 1 and len(tensor) != batch == tensor.shape[1]:
            tensor = tensor.transpose(0, 1)
        elif tensor.dim() and len(tensor) > batch and len(tensor) % batch == 0:
            tensor = tensor.reshape(batch, -1, *tensor.shape[1:])
        if tensor.dim() and len(tensor) == batch:
            found.append(tensor)
    if len(found) >= MIN_CELLS and len({tensor.shape for tensor in found}) == 1:
        return [torch.stack(found, 1)]
    return found


@dataclass(frozen=True, slots=True)
class HalfReach:
    """How far an output looks to one side, over several changed inputs, in cells of the input.

    Where the output lies in the input is not known to the cell, since crops may be at either end.
    """

    most: float
    least: float
    varies: float  # between the changed cells


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an output looks along an axis."""

    back: HalfReach  # to inputs before its own place
    ahead: HalfReach
    step: float  # cells of the input that one of the output is

    @property
    def looks_back(self) -> bool:
        """True if it looks back, and no further ahead than an output cell reaches."""
        return self._ends(self.ahead) and self.back.least > ONE_SIDED_RATIO * max(
            self.ahead.most, 0
        )

    @property
    def looks_ahead(self) -> bool:
        """True if it looks ahead, and no further back than an output cell reaches.

        An even kernel that is padded as torch's "same" looks one cell further ahead.
        """
        return (
            self._ends(self.back)
            and self.ahead.least > ONE_SIDED_RATIO * max(self.back.most, 0) + 1
        )

    def _ends(self, side: HalfReach) -> bool:
        """True if a side is seen to end in the output's cell, and there for each changed cell."""
        return side.most < max(1, self.step) and side.varies <= max(2, self.step)

    def has_new_side(self, new: "Reach") -> bool:
        """True if this one looks one way, and the new one further to the other side."""
        if self.looks_back:
            return new.ahead.most > max(self.ahead.most, 0)
        return self.looks_ahead and new.back.most > max(self.back.most, 0)


class AxisPair(NamedTuple):
    """An axis of an input, and the axis of an output that is compared with it."""

    axis: int  # of the spatial axes of the input
    own: int  # of the output's axes without that of images
    step: float  # cells of the input that one of the output is


class ReachKey(NamedTuple):
    """What a reach is measured between."""

    input: int
    axes: tuple[int, ...]  # of the input, on which it may have an order
    output: int
    pair: AxisPair


Reaches = dict[ReachKey, Reach]


def have_new_side(old: Reaches, new: Reaches) -> bool:
    """True if outputs that looked one way alone now look further to the other side."""
    return any(key in new and reach.has_new_side(new[key]) for key, reach in old.items())


def one_way(reaches: Reaches) -> Reaches:
    """Return the reaches to one side."""
    return {key: reach for key, reach in reaches.items() if reach.looks_back or reach.looks_ahead}


def reaches_of(
    before: Tensor, after: Tensor, sides: Sequence[int], cells: Sequence[Sequence[int]]
) -> dict[AxisPair, Reach]:
    """Return how far an output looks, by the output's values for two inputs.

    Args:
        before, after: (N, ...) for N inputs, and for the same inputs with a changed cell each.
        sides: Of the input, along its spatial axes.
        cells: The changed cell of each input, along these axes.
    """
    are_finite = before.isfinite() & after.isfinite()
    change = torch.where(are_finite, (after.double() - before.double()).abs(), 0)
    rounding = min(1e-6, 10 * torch.finfo(before.dtype).eps)  # as of Fourier transforms
    changed = (change > rounding * change.max()) | (before.isfinite() != after.isfinite())
    found: dict[AxisPair, Reach] = {}
    for layout in _layouts(changed.dim() - 1, len(sides)):
        for axis, own in layout.items():
            size = changed.shape[1 + own]
            if min(size, sides[axis]) < MIN_CELLS:
                continue
            places: list[int] = []
            lines: list[list[int]] = []
            for one, cell in zip(changed, cells, strict=True):
                line = _line(one, layout, axis, cell, sides)
                if line:  # a change may have no effect
                    places.append(cell[axis])
                    lines.append(line)
            if len(lines) > 1:
                for step in _steps(sides[axis] / size):
                    pair = AxisPair(axis, own, step)
                    found[pair] = _reach(places, lines, sides[axis], size, step)
    return found


def _layouts(own_dims: int, dims: int) -> Iterator[dict[int, int]]:
    """Yield where the axes of the input may be in the output: adjacent ones, or one alone."""
    if own_dims <= dims:
        for axis in range(dims):
            for own in range(own_dims):
                yield {axis: own}
    for first in range(own_dims - dims + 1):
        yield {axis: first + axis for axis in range(dims)}


def _line(
    changed: Tensor, layout: dict[int, int], axis: int, cell: Sequence[int], sides: Sequence[int]
) -> list[int]:
    """Return the changed cells along an axis: in the line through the cell, or in the whole map.

    In rows above its own, PixelCNN looks to both sides, so maps are not summed up at first.
    """
    index: list[slice] = [slice(None)] * changed.dim()
    for other, own in layout.items():
        if other != axis:
            place = cell[other] * changed.shape[own] // sides[other]
            index[own] = slice(place, place + 1)
    for part in (changed[tuple(index)], changed):
        along = part.movedim(layout[axis], 0).reshape(part.shape[layout[axis]], -1).any(1)
        if along.any():
            return [int(place) for place in along.nonzero()]
    return []


def _steps(ratio: float) -> set[float]:
    """Return how many input cells one of the output may be, if their numbers have this ratio."""
    return {1, round(ratio) if ratio >= 0.75 else 1 / round(1 / ratio)}


def _reach(
    places: Sequence[int], lines: Sequence[Sequence[int]], side: int, size: int, step: float
) -> Reach:
    """Return the reach of outputs that change in these lines with inputs at these places."""
    missing = side - size * step
    # Where the output's first cell may lie in the input: maps may be cut at either end.
    offsets = (0, int(missing / 2) + (step - 1) / 2, max(missing, 0))
    first = min(offsets)
    last = max(offsets)
    back = [step * max(line) + last - place for place, line in zip(places, lines, strict=True)]
    ahead = [place - step * min(line) - first for place, line in zip(places, lines, strict=True)]
    uncertain = last - first
    back_is_cut = [max(line) == size - 1 for line in lines]
    ahead_is_cut = [min(line) == 0 for line in lines]
    return Reach(_side(back, back_is_cut, uncertain), _side(ahead, ahead_is_cut, uncertain), step)


def _side(reaches: Sequence[float], are_cut: Sequence[bool], uncertain: float) -> HalfReach:
    """Sum up what is seen at each place; where a map's border cuts it, it may be more."""
    whole = [reach for reach, is_cut in zip(reaches, are_cut, strict=True) if not is_cut]
    return HalfReach(
        most=max(reaches),
        least=min(whole or reaches) - uncertain,
        varies=max(reaches) - min(reaches),
    )
