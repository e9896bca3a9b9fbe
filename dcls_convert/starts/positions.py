"""Find positions of elements whose kernels are close to given kernel lines.

The footprint of an element is its share in each cell of the box in which kernels are fitted. For
example, two bilinear elements for an old kernel of three cells, in a window of seven:

    position, from the window's centre       -3    -2    -1     0     1     2     3
    old kernel                                            1     4     2
    box position, from the box's first cell               0     1     2      squared error
                                                                                  21
    added first, on the grid: 5.6 at 1.25                 0     4.2   1.4          1.40
    added second: 1 at 0                                  1     0     0            0.40
    both off the grid: 5.98 at 1.328, 1 at 0              1     4.02  1.96         0.002

The footprint of the element at 1.25 is (0, 0.75, 0.25). The box of other interpolations has more
cells on either side (see `Box`).

A kernel error costs the sum of its squares or, with roots, the sum of squares of error @ root. So
an element's atom is its footprint, or footprint @ root. For given positions, linear least squares
on the atoms gives the best weights. `search.py` finds positions.

Axes: N kernel lines (see `layers/elements.py`), L layers, E elements, A axes, S cells of the box.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..depthwise.devices import in_double
from .boxes import Box
from .search import FootprintTables, Search

# Points of the grid in each cell, along each axis: the first number with which the grid has at most
# MAX_POINTS.
POINTS_PER_CELL = (4, 2, 1)
MAX_POINTS = 1200
MAX_POINTS_BY_COUNT = 300  # for errors at every count, which take more moves
# All elements are moved again when their number has grown by this factor. Moving them more often
# takes longer, and brings kernels hardly closer.
MOVE_AT_GROWTH = 1.5
MOVE_AT_GROWTH_BY_COUNT = 1.1  # for errors at every count
FLOATS_AT_ONCE = 1_000_000  # in a search; a larger search does not fit into the CPU's cache


class LineRoots(NamedTuple):
    """Square roots of the cost matrices: an error e of a line costs |e @ root|^2."""

    by_channel: Tensor  # (in_channels, S, S)
    channel_of_line: Tensor  # (N,)

    def of(self, lines: Tensor) -> Tensor:
        """Return the roots of these lines: (lines, S, S)."""
        return self.by_channel[self.channel_of_line[lines]]


@torch.no_grad()
def fit_lines(
    targets: Tensor, count: int, box: Box, roots: LineRoots | None
) -> tuple[Tensor, Tensor]:
    """Find box positions (N, E, A), and weights (N, L, E), of kernels close to the targets.

    Args:
        targets: Kernel lines (N, L, S).
        count: Elements E of each kernel.
        box: Box within which the kernels are fitted.
        roots: Roots of the lines; without them, an error e costs |e|^2.
    """
    positions = []
    weights = []
    # The more elements, the more iterations until all have settled.
    iterations = 2 * count.bit_length() - 1
    for search in _searches(targets, count, box, roots, MAX_POINTS):
        search.add_elements_(MOVE_AT_GROWTH)
        search.refine_(iterations)
        positions.append(search.positions().to(targets))
        weights.append(search.weights().to(targets))
    return torch.cat(positions), torch.cat(weights)


@torch.no_grad()
def errors_by_count(targets: Tensor, max_count: int, box: Box, roots: LineRoots | None) -> Tensor:
    """Return the squared error of each layer with 0 to `max_count` elements: (L, 1 + max_count).

    The result is in float64. Elements stay on a grid. Arguments are as in `fit_lines`.
    """
    errors_of_parts = []
    for search in _searches(targets, max_count, box, roots, MAX_POINTS_BY_COUNT):
        errors = search.add_elements_(MOVE_AT_GROWTH_BY_COUNT)
        errors_of_parts.append(torch.stack(errors, dim=-1).sum(0))
    return torch.stack(errors_of_parts).sum(0)


def _searches(
    targets: Tensor, count: int, box: Box, roots: LineRoots | None, max_points: int
) -> Iterator[Search]:
    """Yield searches, each for a part of the lines, to bound memory."""
    layers, cells = targets.shape[1:]
    tables = FootprintTables.of(box, _points_per_cell(box, max_points), in_double(targets[:0]))
    # Numbers for a line: products with the grid, and the matrices of `Search.refine_`.
    floats = (layers + 1) * len(tables.grid) + (1 + len(box.axes)) * count * (cells + count)
    if roots is not None:
        floats += cells**2
    for part in _parts(targets, floats):
        roots_of_part = None if roots is None else in_double(roots.of(part))
        yield Search(in_double(targets[part]), count, tables, roots_of_part)


def _points_per_cell(box: Box, max_points: int) -> int:
    """Return how many points of the grid there are in each cell, along each axis."""
    for per_cell in POINTS_PER_CELL:
        sides = zip(box.lowest, box.highest, strict=True)
        if math.prod(1 + per_cell * (highest - lowest) for lowest, highest in sides) <= max_points:
            break
    return per_cell


def squared_errors(
    targets: Tensor, positions: Tensor, weights: Tensor, box: Box, roots: LineRoots | None
) -> Tensor:
    """Return the squared errors (N, L) of elements at box positions (N, E, A), in float64."""
    errors = []
    cells = targets.shape[2]
    for part in _parts(targets, cells * (positions.shape[1] + cells)):
        footprint = box.footprint(in_double(positions[part]))
        error = in_double(targets[part]) - in_double(weights[part]) @ footprint
        if roots is not None:
            error = error @ in_double(roots.of(part))
        errors.append(error.square().sum(-1))
    return torch.cat(errors)


def _parts(targets: Tensor, floats_of_line: int) -> Sequence[Tensor]:
    """Split the indices of lines into parts that are computed together, to bound memory."""
    lines_at_once = max(1, FLOATS_AT_ONCE // floats_of_line)
    lines = torch.arange(len(targets), device=targets.device)
    parts: Sequence[Tensor] = torch.split(lines, lines_at_once)
    return parts
