"""Where the elements of each positions tensor are in their window, counted in bins."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.inspection import Inspection, PositionRow, PositionSet, position_sets
from ..depthwise.geometry import extent, size_text
from ..layers.interpolation import learnt_axes
from ..layers.position_statistics import BORDER_MARGIN, OVERLAP_DISTANCE, bins
from ..planning.plan import ConversionPlan
from ..tables import counted

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

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def title(self) -> str:
        layers = f"{counted(len(self.row.layers), 'layer')} share" if len(self.row.layers) > 1 else "1 layer has"
        kernels = f"{self.row.kernel_count} elements in {size_text(self.row.dilated_size)} cells"
        return f"{layers} {counted(self.row.elements, 'element')}: {self.row.kernels:,} kernels of {kernels}"

    @property
    def sentences(self) -> tuple[str, str, str]:
        """Spread, share at the border, and overlap."""
        row, even = self.row, even_border_share(self.size)
        spread = " and ".join(f"{side:.2f}" for side in row.spread)
        verdict = "the window may be too small" if row.border_share > even else "the window is large enough"
        return (
            f"Spread: {spread} cells along {' and '.join(self.axes)}; mean distance {row.mean_distance:.2f} cells.",
            f"Border: {100 * row.border_share:.1f} % of the elements; {100 * even:.1f} % if spread evenly: {verdict}.",
            f"Overlap: {100 * row.overlap_share:.1f} % of the elements have a near neighbour in their kernel.",
        )


# What the sentences mean.
EXPLANATION = (
    "Spread is the standard deviation, distance that from the kernel's centre. An element is at the border within "
    f"{BORDER_MARGIN:g} cells of the window's limit; where more are than spread evenly, the window may be too small. "
    f"Elements of one kernel nearer than {OVERLAP_DISTANCE:g} cell do much the same work; tuning.repulsive_loss pushes "
    "them apart."
)


def even_border_share(size: tuple[int, ...]) -> float:
    """The share at the border of elements that are spread evenly over a window of these cells."""
    return 1 - math.prod(max(0.0, 1 - 2 * BORDER_MARGIN / (side - 1)) for side in size if side > 1)


def position_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], inspection: Inspection
) -> tuple[PositionPicture, ...]:
    """A picture for each positions tensor of the plan, in the inspection's order."""
    sets = position_sets(plan)
    cells = sum(math.prod(place.learnt_size[-2:]) for place in sets)
    per_cell = FINE if cells * FINE**2 <= MOST_BINS else 1
    rows = zip(sets, inspection.positions, strict=True)
    return tuple(_picture(place, row, state[place.parameters["positions"]], per_cell) for place, row in rows)


def _picture(place: PositionSet, row: PositionRow, positions: Tensor, per_cell: int) -> PositionPicture:
    dims, size = len(row.dilated_size), place.learnt_size
    learnt = learnt_axes(dims, row.dense_axes)
    index = [bins(axis.flatten(), side, per_cell) for axis, side in zip(positions, size, strict=True)]
    lengths = [side * per_cell for side in size]
    high, wide = [torch.zeros_like(index[0]), *index][-2:]
    height, width = [1, *lengths][-2:]
    extents = [
        tuple(extent(layer.kernel_size[axis], layer.dilation[axis]) for axis in learnt) for layer in place.layers
    ]
    return PositionPicture(
        row=row,
        axes=tuple(AXES[axis - dims] for axis in learnt),
        size=size,
        bins_per_cell=per_cell,
        heat=torch.bincount(high * width + wide, minlength=height * width).reshape(height, width),
        histograms=tuple(
            tuple(torch.bincount(places, minlength=length).tolist())
            for places, length in zip(index, lengths, strict=True)
        ),
        extents=tuple(dict.fromkeys(extents)),
    )
