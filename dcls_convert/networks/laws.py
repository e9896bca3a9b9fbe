"""Read laws off a table of dependence. Windows must not break them.

An output axis and an input axis are a pair if the changed output cells move with the changed input
cells. The slope of this movement and the sizes of both axes tell how output cells lie over input
cells: `find_pairs`. A law names displacements that must not occur, because outputs did not look
there before: `laws_of_pair`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from ..geometry import Direction
from .sites import ONE_SIDE
from .table import MIN_CELLS, SLACK, AxisPair, DependenceColumn, DependenceTable, Interval

MIN_VIEWS = 3  # a law needs this many columns in which outputs change
NEARLY_ALL = 0.75  # share of the output cells that change, if each looks at nearly all inputs
FIRST_SPATIAL = 2  # index of the first spatial axis in (N, C, *spatial)
# Least correlation of input cells and changed output cells, if their axes belong together.
MIN_CORRELATION = 0.85
MIN_CORRELATION_OF_OTHERS = 0.95  # the same for axes in different places, if there are several
LEAST_ERROR = 0.05  # assumed relative error of a slope
MAX_RATIO_OF_SLOPES = 1.3  # between the first and the last changed outputs
MAX_EXCESS = 4  # strides by which an edge may move unevenly, as pooling makes it do
MAX_PADDED = 1.5  # padding makes a map longer by a smaller factor; joined maps are longer
MAX_STRIDE = 64
MAX_UPSAMPLING = 16
MAX_DENOMINATOR = 4  # of less usual strides: 3/2 is pooling by 3, then upsampling by 2

BLIND_SPOT = (
    "outputs do not depend on the input at their own place, but on those around it; a larger "
    "window would also read this place"
)

# Pairs (input cell, the first or last output cell that changes with this input cell).
EdgeCells = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Edge:
    """The first, or the last, changed output cells, which move with the changed input cells."""

    correlation: float
    slope: float  # output cells per input cell
    cells: EdgeCells


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """Displacements that must not occur: above `most`, below `least`, or inside `hole`."""

    reason: str
    pair: AxisPair
    lines: tuple[AxisPair, ...]  # see `DependenceColumn.cells`
    least: float = -math.inf
    most: float = math.inf
    hole: Interval = (0, 0)

    @property
    def side(self) -> Direction:
        """The only side to which outputs look; for a law with the reason ONE_SIDE."""
        return "back" if self.most < math.inf else "ahead"

    def is_broken_by(self, column: DependenceColumn) -> bool:
        """True if the column has a forbidden displacement, or the output has lost its shape."""
        if column.changed[self.pair.output] is None:
            return True
        for low, high in column.displacements(self.pair, self.lines):
            in_hole = self.hole[0] + SLACK < low and high < self.hole[1] - SLACK
            if low > self.most + SLACK or high < self.least - SLACK or in_hole:
                return True
        return False


def laws_of(table: DependenceTable) -> list[Law]:
    """Return the laws for all outputs that keep their shape, along all axes of the table."""
    laws: list[Law] = []
    for pair, lines in _pairs_and_lines(table):
        views = [column.displacements(pair, lines) for column in table.columns]
        laws += laws_of_pair(pair, lines, [view for view in views if view])
    return laws


def laws_of_pair(
    pair: AxisPair, lines: tuple[AxisPair, ...], views: Sequence[Sequence[Interval]]
) -> Iterator[Law]:
    """Yield the laws that the displacements of all columns obey.

    1. Outputs that do not look ahead of (behind) their own place must go on not doing so:

        x x x [x] . . .      looks back: the view ends at its own place, and its centre lies before
        . . x [x] x . .      ordinary, no law: the centre of the view lies in its own place
        . . x [x x] . .      no law either: a kernel of 3 with a stride of 2

    2. If outputs skip the input at their own place but see both neighbours, they must go on
       skipping it:

        . x x [.] x x .
    """
    if len(views) < MIN_VIEWS:
        return
    most = max(low for view in views for low, _ in view)
    least = min(high for view in views for _, high in view)
    centre = (most + least) / 2
    start, end = pair.own
    if most <= end + SLACK and centre < start - SLACK:
        yield Law(reason=ONE_SIDE, pair=pair, lines=lines, most=max(most, start))
    # torch pads an even centred kernel so that it looks one cell further ahead.
    if least >= start - SLACK and centre > end + 0.5 + SLACK:
        yield Law(reason=ONE_SIDE, pair=pair, lines=lines, least=min(least, end))
    if pair.is_cut:  # the own place is not known: look for a hole in the middle of the view
        start = end = centre
    last_back = -math.inf
    first_ahead = math.inf
    views_to_both_sides = 0
    for view in views:
        # The own place (start to end) counts as ahead: an output that sees it has no hole there.
        back = max((high for _, high in view if high < start - SLACK), default=-math.inf)
        ahead = min((low for low, _ in view if low > start - SLACK), default=math.inf)
        last_back = max(last_back, back)
        first_ahead = min(first_ahead, ahead)
        views_to_both_sides += math.isfinite(ahead - back)
    is_hole = first_ahead > end + SLACK and first_ahead - last_back > 1 + SLACK
    if is_hole and 2 * views_to_both_sides >= len(views):
        yield Law(reason=BLIND_SPOT, pair=pair, lines=lines, hole=(last_back, first_ahead))


def is_settled(table: DependenceTable) -> bool:
    """True if outputs look to all sides and at their own place, so that no law can hold."""
    if any(column.is_empty() for column in table.columns) or _unpaired_axes(table):
        return False
    for pair, lines in _pairs_and_lines(table):
        start, end = pair.own
        looks_back = looks_ahead = looks_at_own = False
        for column in table.columns:
            for low, high in column.displacements(pair, lines):
                looks_back |= high < start - SLACK
                looks_ahead |= low > end + SLACK
                looks_at_own |= low <= end + SLACK and high >= start - SLACK
        if pair.is_cut or not (looks_back and looks_ahead and looks_at_own):
            return False
    return True


def lost_axes(table: DependenceTable) -> list[int]:
    """Return the input axes along which parts of outputs change, but do not move with the probe."""
    lost = set()
    for output, output_axis in _unpaired_axes(table):
        for axis in table.axes:
            if output_axis >= FIRST_SPATIAL and table.is_in_place(axis, output, output_axis):
                lost.add(axis)
    return sorted(lost)


def _unpaired_axes(table: DependenceTable) -> list[tuple[int, int]]:
    """Return (output, axis) where only part of the cells change, but no input axis is paired."""
    paired = {(pair.output, pair.output_axis) for pair in find_pairs(table)}
    unpaired = []
    for output, shape in table.shapes().items():
        for axis, size in enumerate(shape):
            if size < MIN_CELLS or (output, axis) in paired:
                continue
            counts = [len(column.cells(output, axis)) for column in table.columns]
            if any(0 < count < NEARLY_ALL * size for count in counts):
                unpaired.append((output, axis))
    return unpaired


def _pairs_and_lines(table: DependenceTable) -> Iterator[tuple[AxisPair, tuple[AxisPair, ...]]]:
    """Yield each pair for the whole output and, if the output has other pairs, for the line.

    The line is the part of the output that lies over the probe along all other axes.
    """
    pairs = find_pairs(table)
    for pair in pairs:
        others = []
        for other in pairs:
            if other.output == pair.output and other.input_axis != pair.input_axis:
                others.append(other)
        yield pair, ()
        if others:
            yield pair, tuple(others)


def find_pairs(table: DependenceTable) -> list[AxisPair]:
    """Return the pairs: for each axis of each output, its input axis, if it has one.

    The changed output cells move with the cells of this input axis. If outputs look at nearly all
    of a small map, nothing moves. Then spatial axes of equal size in the same place are a pair.
    """
    pairs: list[AxisPair] = []
    for output, shape in table.shapes().items():
        best: dict[int, AxisPair] = {}  # by the axis of the output
        for axis in table.axes:
            for output_axis, size in enumerate(shape):
                pair = AxisPair(input_axis=axis, output=output, output_axis=output_axis)
                found = _placed(pair, table, size)
                if found is None:
                    continue
                is_in_place = table.is_in_place(axis, output, output_axis)
                is_clear = is_in_place or len(table.axes) == 1
                if found.correlation < MIN_CORRELATION_OF_OTHERS and not is_clear:
                    continue
                known = best.get(output_axis)
                if known is None or (found.correlation, is_in_place) > (known.correlation, False):
                    best[output_axis] = found
        moving = {pair.input_axis for pair in best.values()}
        for axis in table.axes:
            output_axis = len(shape) - len(table.input_shape) + axis
            if axis in moving or output_axis < FIRST_SPATIAL or output_axis in best:
                continue
            if shape[output_axis] == table.input_shape[axis]:
                pair = AxisPair(input_axis=axis, output=output, output_axis=output_axis)
                best[output_axis] = pair
        pairs += best.values()
    return pairs


def _placed(pair: AxisPair, table: DependenceTable, size: int) -> AxisPair | None:
    """Return the pair with its stride and place; None if no edge moves with the input cells.

    The stride is the slope of the edges. The place follows from the sizes, up to the cells cut off:

        side 7, size 3, stride 2:      0 0 1 1 2 2 .   to   . 0 0 1 1 2 2      own = 0 to 2
        side 6, size 4, stride 3/2:    input cells 0 to 2 are under outputs 0 and 1,
                                       3 to 5 under outputs 2 and 3            own = -1.5 to 2
    """
    if size < MIN_CELLS:
        return None
    side = table.input_shape[pair.input_axis]
    edge = _clearest_edge(pair, table, size)
    stride = None if edge is None else _stride(edge, side, size)
    if edge is None or stride is None:
        return None
    cells = float(stride)
    first_place = min(0.0, cells - 1)
    last_place = max(0.0, cells - 1)
    if stride.denominator <= MAX_UPSAMPLING:
        first_place = -(stride.denominator - 1) * cells
        last_place = stride.numerator - 1
    cut = side - size * cells
    # Outputs beyond the input see padding. It is assumed to be equal on both sides.
    padded = int(cut / 2) if cut <= -cells else 0
    own = (first_place + padded, last_place + max(0.0, cut))
    is_cut = cut >= max(1, cells)
    return replace(pair, stride=stride, own=own, is_cut=is_cut, correlation=edge.correlation)


def _clearest_edge(pair: AxisPair, table: DependenceTable, size: int) -> _Edge | None:
    """Return the edge (see `_Edge`) that moves most clearly with the input cells, if one moves.

    One edge suffices, because the map's border may cut the other edge. Return None if the slopes
    differ so much that several maps must be joined along the axis.
    """
    moving: list[_Edge] = []
    clear_slopes: list[float] = []
    for cells in _edges(pair, table, size):
        edge = _moving_edge(cells)
        if edge is None:
            continue
        moving.append(edge)
        if edge.correlation > MIN_CORRELATION_OF_OTHERS:
            clear_slopes.append(edge.slope)
    if max(clear_slopes, default=1) > MAX_RATIO_OF_SLOPES * min(clear_slopes, default=1):
        return None
    return max(moving, default=None)


def _edges(pair: AxisPair, table: DependenceTable, size: int) -> tuple[EdgeCells, EdgeCells]:
    """Return the first and the last changed cells, without the cells at the border of the map."""
    first_edge: EdgeCells = []
    last_edge: EdgeCells = []
    for column in table.columns:
        cells = column.cells(pair.output, pair.output_axis)
        first, last = column.probe.cells[pair.input_axis]
        if cells and min(cells) > 0:
            first_edge.append((first, min(cells)))
        if cells and max(cells) < size - 1:
            last_edge.append((last, max(cells)))
    return first_edge, last_edge


def _moving_edge(cells: EdgeCells) -> _Edge | None:
    """Return the edge that these cells form; None if output cells do not move with input cells."""
    if len({cell for cell, _ in cells}) < MIN_CELLS:
        return None
    (x, xy), (_, y) = torch.tensor(cells, dtype=torch.float64).T.cov().tolist()
    if xy <= MIN_CORRELATION * math.sqrt(x * y):
        return None
    return _Edge(correlation=xy / math.sqrt(x * y), slope=xy / x, cells=cells)


def _stride(edge: _Edge, side: int, size: int) -> Fraction | None:
    """Return the stride near the edge's slope that fits the edge best; None if none fits.

    Args:
        edge: The edge.
        side: Cells of the input along its axis.
        size: Cells of the output along its axis.
    """
    # Relative standard error of the slope. Candidates are strides within three standard errors.
    error = math.sqrt(max(0.0, 1 / edge.correlation**2 - 1) / (len(edge.cells) - 2))
    candidates: list[Fraction] = []
    for strides in _strides(Fraction(side, size)):
        for candidate in strides:
            is_near = abs(math.log(candidate * edge.slope)) <= LEAST_ERROR + 3 * error
            if is_near and candidate * size <= MAX_PADDED * side:
                candidates.append(candidate)
        if candidates:
            break

    def misfit(stride: Fraction) -> tuple[float, int, float]:
        from_sizes = abs(math.log(stride * size / side))
        return round(_excess(edge, stride), 3), stride.denominator, from_sizes

    stride = min(candidates, key=misfit, default=None)
    if stride is None or round(_excess(edge, stride), 3) > MAX_EXCESS * max(1.0, float(stride)):
        return None
    return stride


def _excess(edge: _Edge, stride: Fraction) -> float:
    """Return by how many input cells an edge deviates from the stride, beyond its phases."""
    phases = float(stride)
    if stride.denominator <= MAX_UPSAMPLING:
        phases = stride.numerator - 1
    offsets = [cell - float(stride) * place for cell, place in edge.cells]
    return max(0.0, max(offsets) - min(offsets) - phases)


def _strides(ratio: Fraction) -> list[list[Fraction]]:
    """Return the usual strides, and less usual strides, which result from several layers."""
    usual = [*map(Fraction, range(1, MAX_STRIDE + 1))]
    usual += [Fraction(1, factor) for factor in range(2, MAX_UPSAMPLING + 1)]
    others = [ratio]
    for denominator in range(2, MAX_DENOMINATOR + 1):
        others += [Fraction(numerator, denominator) for numerator in range(1, MAX_STRIDE + 1)]
    return [usual, others]
