"""Where the elements of each positions tensor are in their window, counted in bins."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.inspection import Inspection, PositionRow, position_sets
from ..depthwise.geometry import extent
from ..layers.interpolation import learnt_axes
from ..layers.position_statistics import BORDER_MARGIN, bins
from ..planning.plan import ConversionPlan

AXES = ("depth", "row", "column")  # the last ones, for fewer dimensions
FINE = 3  # bins in a cell along each axis; odd, so that an element on a cell is in the middle of a bin
MOST_BINS = 150_000  # of all heat maps together; above, a bin is a cell


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionPicture:
    """The elements of a tie group, or of an untied layer. Each is counted once, whatever the number of layers."""

    row: PositionRow  # the statistics
    axes: tuple[str, ...]  # names of the learnt axes
    size: tuple[int, ...]  # cells of the window along the learnt axes
    bins_per_cell: int
    heat: Tensor  # elements in each bin of the last two learnt axes, of which the first is 1 where there is one alone
    histograms: tuple[tuple[int, ...], ...]  # elements in each bin along each learnt axis
    extents: tuple[tuple[int, ...], ...]  # cells of the old kernels along the learnt axes, in the middle of the window
    even_share: float  # of elements spread evenly, that within the border's margin of the window's limit


def even_border_share(size: tuple[int, ...]) -> float:
    """The share at the border of elements that are spread evenly over a window of these cells."""
    return 1 - math.prod(max(0.0, 1 - 2 * BORDER_MARGIN / (side - 1)) for side in size if side > 1)


def position_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], inspection: Inspection
) -> tuple[PositionPicture, ...]:
    """A picture for each positions tensor of the plan, in the inspection's order."""
    sets, pictures = position_sets(plan), []
    cells = sum(math.prod(place.learnt_size[-2:]) for place in sets)
    per_cell = FINE if cells * FINE**2 <= MOST_BINS else 1
    for place, row in zip(sets, inspection.positions, strict=True):
        dims, size, positions = len(row.dilated_size), place.learnt_size, state[place.parameters["positions"]]
        learnt = learnt_axes(dims, row.dense_axes)
        index = [bins(axis.flatten(), side, per_cell) for axis, side in zip(positions, size, strict=True)]
        lengths = [side * per_cell for side in size]
        high, wide = [torch.zeros_like(index[0]), *index][-2:]
        height, width = [1, *lengths][-2:]
        olds = [tuple(extent(old.kernel_size[axis], old.dilation[axis]) for axis in learnt) for old in place.layers]
        counts = (torch.bincount(places, minlength=length) for places, length in zip(index, lengths, strict=True))
        picture = PositionPicture(
            row=row,
            axes=tuple(AXES[axis - dims] for axis in learnt),
            size=size,
            bins_per_cell=per_cell,
            heat=torch.bincount(high * width + wide, minlength=height * width).reshape(height, width),
            histograms=tuple(tuple(along.tolist()) for along in counts),
            extents=tuple(dict.fromkeys(olds)),
            even_share=even_border_share(size),
        )
        pictures.append(picture)
    return tuple(pictures)
