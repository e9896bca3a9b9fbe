"""Find to which sides the outputs of a network look, from the outputs that change with an input.

The outputs of a causal network look back only; so do those of a PixelCNN along both axes, row by
row. Every convolution that is not centred on purpose shows in this way, whatever code shifts the
maps.

The axes of an output are compared with those of an input in their order. Their sizes may differ, as
after strides and crops.

For example, a kernel of 3 cells whose output is shifted by one: if cell 5 of the input changes,
cells 5 to 7 of the output do. So the output looks 2 cells back and 0 ahead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_CELLS = 4  # along an axis; with fewer, sides cannot be told apart
# Where the changed cell of each image of a batch is, as a share of the side.
PLACES = (0.3, 0.5, 0.7)
# A centred kernel looks nearly as far ahead as back, even near a border. Outputs are one-sided if
# they look more than this many times as far to one side as to the other.
ONE_SIDED_RATIO = 2


def spatial_axes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return the axes along which the cells of an input may have an order.

    They are the second axis, as in (N, time, channels), and all later axes together.
    """
    if tensor.dim() < 2:
        return []
    groups: list[tuple[int, ...]] = [(1,)]
    if tensor.dim() > 2:
        groups.append(tuple(range(2, tensor.dim())))
    return [axes for axes in groups if max(tensor.shape[axis] for axis in axes) >= MIN_CELLS]


def with_changed_cells(tensor: Tensor, axes: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """Change one cell of each image; return the cells, and the changed batches.

    If the batch has fewer images than there are PLACES, there is a batch for each place.
    """
    cells = []
    batches = []
    batch_count = 1 if len(tensor) >= len(PLACES) else len(PLACES)
    for first_place in range(batch_count):
        changed = tensor.clone()
        for number, image in enumerate(changed):
            place = PLACES[(first_place + number) % len(PLACES)]
            cell = [int(place * tensor.shape[axis]) for axis in axes]
            index: list[Any] = [slice(None)] * image.dim()
            for axis, position in zip(axes, cell, strict=True):
                index[axis - 1] = position
            image[tuple(index)] = _other_values(image[tuple(index)], tensor)
            cells.append(cell)
        batches.append(changed)
    return cells, batches


def _other_values(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values that differ from these, but are in the range of the tensor's values."""
    if tensor.dtype == torch.bool:
        return ~values
    if not tensor.is_floating_point() and not tensor.is_complex():
        least = int(tensor.amin())
        most = int(tensor.amax())
        count = most - least + 1
        return (least + (values.long() - least + 1 + (most - least) // 2) % count).to(values)
    return -values - values.sgn()


def by_image(outputs: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Return the outputs that have an entry for each image, as (N, ...).

    Images may be on the second axis, or on the first one together with time. Each time step may
    have a tensor of its own; then these are stacked.
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
    """How far an output looks to one side, in cells of the input.

    The distance is measured for several changed cells. It is not known exactly, since maps may have
    been cropped at either end.
    """

    upper: float  # the largest distance is at most this
    lower: float  # the smallest distance is at least this
    spread: float  # difference between the largest and the smallest distance


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an output looks along an axis."""

    back: HalfReach  # to inputs before its own place
    ahead: HalfReach
    cells_per_output: float  # see AxisPair

    @property
    def looks_back(self) -> bool:
        """True if it looks back, and no further ahead than an output cell reaches."""
        return self._looks_only(self.back, self.ahead, slack=0)

    @property
    def looks_ahead(self) -> bool:
        """True if it looks ahead, and no further back than an output cell reaches."""
        # A centred even kernel, padded as by torch's "same", looks one cell further ahead.
        return self._looks_only(self.ahead, self.back, slack=1)

    def _looks_only(self, side: HalfReach, other: HalfReach, *, slack: int) -> bool:
        """True if it looks to one side, and on the other side no further than its own cell.

        The other side must end there for each changed input.

        Args:
            side, other: The two sides.
            slack: A centred output may look this many cells further to the one side.
        """
        ends = other.upper < max(1, self.cells_per_output)
        ends_alike = other.spread <= max(2, self.cells_per_output)
        return ends and ends_alike and side.lower > ONE_SIDED_RATIO * max(other.upper, 0) + slack

    def has_new_side(self, later: "Reach") -> bool:
        """True if this one looks to one side only, and the later one further to the other side."""
        if self.looks_back:
            return later.ahead.upper > max(self.ahead.upper, 0)
        return self.looks_ahead and later.back.upper > max(self.back.upper, 0)


class AxisPair(NamedTuple):
    """An axis of an input, and the axis of an output that is compared with it."""

    input_axis: int  # index among the spatial axes of the input
    output_axis: int  # index among the axes of the output after that of images
    cells_per_output: float  # cells of the input that one cell of the output covers


class ReachKey(NamedTuple):
    """What a reach is measured between."""

    input: int  # index among the inputs
    axes: tuple[int, ...]  # of the input: see `spatial_axes`
    output: int  # index among the outputs
    pair: AxisPair


Reaches = dict[ReachKey, Reach]


def have_new_side(before: Reaches, later: Reaches) -> bool:
    """True if outputs that looked to one side only now look further to the other side."""
    return any(key in later and reach.has_new_side(later[key]) for key, reach in before.items())


def one_way(reaches: Reaches) -> Reaches:
    """Return the reaches to one side only."""
    return {key: reach for key, reach in reaches.items() if reach.looks_back or reach.looks_ahead}


def reaches_of(
    before: Tensor, after: Tensor, sides: Sequence[int], cells: Sequence[Sequence[int]]
) -> dict[AxisPair, Reach]:
    """Return how far an output looks, by the output's values for two inputs.

    Args:
        before, after: (N, ...) for N inputs, and for the same inputs with a changed cell each.
        sides: Sides of the input along its spatial axes.
        cells: The changed cell of each input, along these axes.
    """
    are_finite = before.isfinite() & after.isfinite()
    change = torch.where(are_finite, (after.double() - before.double()).abs(), 0)
    # Fourier transforms, for example, change all outputs by rounding errors.
    rounding = min(1e-6, 10 * torch.finfo(before.dtype).eps)
    changed = (change > rounding * change.max()) | (before.isfinite() != after.isfinite())
    found: dict[AxisPair, Reach] = {}
    for layout in _layouts(len(sides), changed.dim() - 1):
        for input_axis, output_axis in layout.items():
            side = sides[input_axis]
            size = changed.shape[1 + output_axis]
            if min(size, side) < MIN_CELLS:
                continue
            changed_inputs: list[int] = []
            changed_outputs: list[list[int]] = []
            for image, cell in zip(changed, cells, strict=True):
                outputs = _changed_along(image, layout, input_axis, cell, sides)
                if outputs:  # a change may have no effect
                    changed_inputs.append(cell[input_axis])
                    changed_outputs.append(outputs)
            if len(changed_inputs) > 1:
                for ratio in _possible_ratios(side / size):
                    pair = AxisPair(input_axis, output_axis, ratio)
                    found[pair] = _reach(changed_inputs, changed_outputs, side, size, ratio)
    return found


def _layouts(input_dims: int, output_dims: int) -> Iterator[dict[int, int]]:
    """Yield which axis of the output each axis of the input may be.

    Either all axes of the input are there, next to each other; or one is there alone.
    """
    if output_dims <= input_dims:
        for input_axis in range(input_dims):
            for output_axis in range(output_dims):
                yield {input_axis: output_axis}
    for first in range(output_dims - input_dims + 1):
        yield {axis: first + axis for axis in range(input_dims)}


def _changed_along(
    changed: Tensor,
    layout: dict[int, int],
    input_axis: int,
    cell: Sequence[int],
    sides: Sequence[int],
) -> list[int]:
    """Return the indices along an axis at which an output changes with a cell of the input.

    Only the line through the cell counts, because a PixelCNN looks to both sides in the rows above
    its own. If nothing changes in this line, the whole map counts.
    """
    line: list[slice] = [slice(None)] * changed.dim()
    for other_axis, output_axis in layout.items():
        if other_axis != input_axis:
            index = cell[other_axis] * changed.shape[output_axis] // sides[other_axis]
            line[output_axis] = slice(index, index + 1)
    for part in (changed[tuple(line)], changed):
        lines = part.movedim(layout[input_axis], 0)
        changes = lines.reshape(len(lines), -1).any(1)
        if changes.any():
            return [int(index) for index in changes.nonzero()]
    return []


def _possible_ratios(ratio: float) -> set[float]:
    """Return how many input cells an output cell may cover, given the ratio of their numbers."""
    if ratio >= 1:
        return {1, round(ratio)}
    return {1, 1 / round(1 / ratio)}


def _reach(
    changed_inputs: Sequence[int],
    changed_outputs: Sequence[Sequence[int]],
    side: int,
    size: int,
    cells_per_output: float,
) -> Reach:
    """Return how far an output looks along an axis.

    Args:
        changed_inputs: Indices of changed input cells.
        changed_outputs: Indices of the output cells that change with each of them.
        side, size: Number of input cells, and of output cells.
        cells_per_output: See AxisPair.
    """
    # Output cell o lies over input cell `cells_per_output * o + offset`. The offset is not known,
    # because a map may have been cut at its start (offset = missing), at its end (0) or at both
    # (the middle).
    missing = side - size * cells_per_output
    offsets = (0, int(missing / 2) + (cells_per_output - 1) / 2, max(missing, 0))
    back = []
    ahead = []
    for index, outputs in zip(changed_inputs, changed_outputs, strict=True):
        back.append(cells_per_output * max(outputs) + max(offsets) - index)
        ahead.append(index - cells_per_output * min(outputs) - min(offsets))
    back_is_cut = [max(outputs) == size - 1 for outputs in changed_outputs]
    ahead_is_cut = [min(outputs) == 0 for outputs in changed_outputs]
    offset_range = max(offsets) - min(offsets)
    return Reach(
        back=_half_reach(back, back_is_cut, offset_range),
        ahead=_half_reach(ahead, ahead_is_cut, offset_range),
        cells_per_output=cells_per_output,
    )


def _half_reach(
    distances: Sequence[float], are_cut: Sequence[bool], offset_range: float
) -> HalfReach:
    """Return how far an output looks to a side, given the distance for each changed input.

    A distance that the border of the map cuts may be larger, so it does not lower the lower bound.
    """
    whole = [distance for distance, is_cut in zip(distances, are_cut, strict=True) if not is_cut]
    return HalfReach(
        upper=max(distances),
        lower=min(whole or distances) - offset_range,
        spread=max(distances) - min(distances),
    )
