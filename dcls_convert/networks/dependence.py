"""Which outputs of a network depend on which cells of its inputs: a table, and laws read off it.

Along an axis of an input and the axis of an output that belongs to it, the table says which output
cells change with which input cells. Here, for a kernel of 3 cells:

              input cell
            0 1 2 3 4 5 6 7
          0 x x . . . . . .     A row is what an output cell looks at: output 2 looks at inputs 1 to
  output  1 x x x . . . . .     3, so its displacements are -1, 0 and +1.
  cell    2 . x x x . . . .     A column is what changes with an input cell: outputs 2 to 4 with
          3 . . x x x . . .     input 3. One run with a changed cell shows it.

The displacement of an entry is `input cell - stride * output cell`. An output's own place are the
displacements in `AxisPair.own`: only 0 if the output has as many cells as the input.

Laws are read off the columns before windows grow, and must hold afterwards.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from ..text import join_with_and
from .inputs import Arguments
from .model_outputs import finite_share

# Per group of axes, one run each; up to MAX_PROBES to meet all phases of a stride.
PROBES = 8
MAX_PROBES = 32
FIRST_PROBES = 4  # enough for most networks that look to all sides
# Probe number i is at place i * factor (modulo their number) along an axis, so that one axis is not
# taken for another.
ORDERS = (1, 3, 5)
MIN_CELLS = 4  # along an axis; fewer have no order
NEARLY_ALL = 0.75  # of a map: outputs that change so often look at nearly all of it
LEAST_ERROR = 0.05  # relative, of a slope
MAX_EXCESS = 4  # strides; pooling lets edges move less evenly than strides do
MAX_PADDED = 1.5  # padding makes maps longer by less than that; joined maps are longer
FIRST_SPATIAL = 2  # index of the first spatial axis in (N, C, *spatial)
MIN_VIEWS = 3  # columns that show something, for a law
# Least correlation of an input's cells and the edges of the columns, if axes belong together.
MIN_CORRELATION = 0.85
MIN_CORRELATION_OF_OTHERS = 0.95  # of axes that are in different places
MAX_STRIDE = 64
MAX_UPSAMPLING = 16
MAX_DENOMINATOR = 4  # of other strides: 3/2 is pooling by 3, then upsampling by 2
MIN_FINITE = 0.25  # share of the outputs; with less, nothing is measured
ROUNDING = 1e-6  # of the largest output; Fourier transforms change all outputs by less
SLACK = 1e-3  # displacements are sums of few fractions

ONE_SIDE = (
    "each output depends only on inputs on one side of it; a larger window would also read inputs "
    "on the other side (later times, or a neighbouring tile)"
)
BLIND_SPOT = (
    "outputs do not depend on the input at their own place, but on those around it; a larger "
    "window would also read this place"
)

Outputs = list[Tensor]
RunOutputs = Callable[[Arguments], Outputs]  # returns the outputs as real numbers
Interval = tuple[float, float]
Edge = list[tuple[int, int]]  # an input cell, and the first or last output that changes with it


class CannotMeasureError(Exception):
    """The network cannot be measured, or not along some axes; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A block of cells of one input, which get other values."""

    input: int  # index among the tensors of the arguments
    cells: dict[int, tuple[int, int]]  # axis -> first and last cell of the block

    def changed(self, arguments: Arguments) -> Arguments:
        """Return the arguments with other values in the block."""
        tensor = arguments.tensors()[self.input].clone()
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values = torch.unique(numbers)
        block = numbers
        for axis, (first, last) in self.cells.items():
            block = block.narrow(axis, first, last - first + 1)
        # The value half a ranking away differs from the old one, but is one of the tensor's own.
        ranks = torch.searchsorted(values.double(), block.double().contiguous())
        block.copy_(values[(ranks + (len(values) + 1) // 2) % len(values)])
        return arguments.with_tensor(self.input, tensor)


@dataclass(frozen=True, slots=True)
class Column:
    """The outputs that change with a block of input cells."""

    probe: Probe
    changed: list[Tensor | None]  # a mask of each output; None if its shape changed

    def is_empty(self) -> bool:
        """True if nothing changed."""
        return all(mask is not None and not mask.any() for mask in self.changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPair:
    """An axis of an input and one of an output, and how the output's cells lie over the input's."""

    input_axis: int
    output: int
    output_axis: int
    stride: Fraction = Fraction(1)  # input cells from one output cell to the next
    own: Interval = (0, 0)  # displacements of the place that may be the output's own
    is_cut: bool = False  # True if the output has fewer cells than there are places
    correlation: float = 0  # of the input cells and an edge of their columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """Displacements that must not occur: above `most`, below `least`, or inside `hole`."""

    reason: str
    pair: AxisPair
    lines: tuple[AxisPair, ...]  # see `changed_cells`
    least: float = -math.inf
    most: float = math.inf
    hole: Interval = (0, 0)

    def is_broken_by(self, column: Column) -> bool:
        """True if an entry of the column has such a displacement, or the output has no map."""
        if column.changed[self.pair.output] is None:
            return True
        for low, high in displacements(self.pair, self.lines, column):
            in_hole = self.hole[0] + SLACK < low and high < self.hole[1] - SLACK
            if low > self.most + SLACK or high < self.least - SLACK or in_hole:
                return True
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns for one group of axes of an input, and the laws that they show."""

    columns: list[Column]
    laws: list[Law]

    def broken_law(self, run: RunOutputs, arguments: Arguments, before: Outputs) -> Law | None:
        """Return a law that the network breaks now; `before` are its outputs for the arguments."""
        if not self.laws:
            return None
        for column in self.columns:
            after = run(column.probe.changed(arguments))
            now = Column(column.probe, changes(before, after))
            for law in self.laws:
                if law.is_broken_by(now):
                    return law
        return None


def check_finite(outputs: Outputs) -> None:
    """Raise CannotMeasureError if most of the outputs are not finite numbers."""
    if finite_share(outputs) < MIN_FINITE:
        raise CannotMeasureError("its outputs have (nearly) no finite numbers")


def tables_of(run: RunOutputs, arguments: Arguments, before: Outputs) -> tuple[list[Table], str]:
    """Return a table for each group of axes, and text on those that could not be measured.

    The first axis, the second one, and all later ones together are groups. So no notion of a batch
    is needed, and any axis may be time.

    Raises:
        CannotMeasureError: Nothing that is changed in the inputs changes an output.
    """
    tables = []
    problems = []
    no_effect = 0
    for index, tensor in enumerate(arguments.tensors()):
        for group in ((0,), (1,), tuple(range(2, tensor.dim()))):
            axes = [axis for axis in group if axis < tensor.dim()]
            axes = [axis for axis in axes if tensor.shape[axis] >= MIN_CELLS]
            if not axes:
                continue
            try:
                columns = find_columns(run, arguments, before, index, axes)
                if columns:
                    tables.append(Table(columns=columns, laws=laws_of(columns, tensor)))
                    axes = lost_axes(columns, tensor)
                    if axes:
                        raise CannotMeasureError("outputs do not move with the changed cells")
                else:
                    no_effect += 1
            except CannotMeasureError as error:
                where = f"axis {axes[0]}"
                if len(axes) > 1:
                    where = f"axes {join_with_and([str(axis) for axis in axes])}"
                problems.append(f"along {where} of input {index}, {error}")
    if no_effect and not tables and not problems:
        raise CannotMeasureError("its outputs do not change with its inputs")
    return tables, "; ".join(problems)


def find_columns(
    run: RunOutputs,
    arguments: Arguments,
    before: Outputs,
    index: int,
    axes: Sequence[int],
) -> list[Column]:
    """Change blocks, which double until half of them have an effect.

        x . x . x .     Only every second cell is read: a block of one cell may meet none,
        [.]   [. x]     a block of two meets one.

    Returns:
        The columns; [] if not even the whole input has an effect.

    Raises:
        CannotMeasureError: Most blocks have no effect, whatever their size.
    """
    tensor = arguments.tensors()[index]
    sides = [tensor.shape[axis] for axis in axes]

    def column_of(cells: dict[int, tuple[int, int]]) -> Column:
        probe = Probe(input=index, cells=cells)
        return Column(probe, changes(before, run(probe.changed(arguments))))

    size = 1
    while size == 1 or size <= max(sides) // 4:
        blocks = spread_blocks(sides, size, [])
        columns = []
        for cells in blocks:
            columns.append(column_of(dict(zip(axes, cells, strict=True))))
            if len(columns) == FIRST_PROBES and is_settled(columns, tensor):
                return columns
        if 2 * sum(column.is_empty() for column in columns) <= len(columns):
            strides = [pair.stride.numerator for pair in find_all_pairs(columns, tensor)]
            if lost_axes(columns, tensor):
                strides.append(MAX_PROBES)
            blocks_for_strides = spread_blocks(sides, size, strides)
            if blocks_for_strides != blocks:
                blocks = blocks_for_strides
                columns = [column_of(dict(zip(axes, cells, strict=True))) for cells in blocks]
            return columns
        size *= 2
    if column_of({}).is_empty():  # the whole input
        return []
    raise CannotMeasureError("most changed cells change no output")


def spread_blocks(
    sides: Sequence[int], size: int, strides: Sequence[int]
) -> list[tuple[tuple[int, int], ...]]:
    """Spread blocks over the middle half of the axes; return their first and last cells.

    They meet all phases of the strides, as far as there is room: the step from one to the next has
    no factor in common with a stride.
    """
    count = PROBES
    while count < MAX_PROBES and count < 2 * max(strides, default=0):
        count *= 2
    blocks_along = []
    for side, factor in zip(sides, ORDERS, strict=False):
        length = min(size, side)
        last = side - length
        room = last // 2 + 1
        step = max(1, (room // count - 1) | 1)  # odd, for strides that are not known yet
        while any(math.gcd(step, stride) > 1 for stride in strides):
            step -= 2
        places = min(count, room)
        first = (last - step * (places - 1)) // 2
        numbers = [*range(0, count, 2), *range(1, count, 2)]  # so that the first ones are far apart
        starts = [first + step * (number * factor % count % places) for number in numbers]
        blocks_along.append([(start, start + length - 1) for start in starts])
    return list(dict.fromkeys(zip(*blocks_along, strict=True)))


def changes(before: Outputs, after: Outputs) -> list[Tensor | None]:
    """Return where outputs differ. What is not finite says nothing."""
    masks: list[Tensor | None] = [None] * len(before)
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        if old.shape != new.shape:
            continue
        finite = old.isfinite() & new.isfinite()
        values = torch.where(finite, old.double(), 0)
        difference = torch.where(finite, new.double() - values, 0).abs()
        scale = max(values.abs().max(), difference.max()) if values.numel() else 0
        rounding = min(ROUNDING, 10 * torch.finfo(old.dtype).eps)
        masks[number] = difference > rounding * scale
    return masks


def changed_cells(
    pair: AxisPair, lines: Sequence[AxisPair], column: Column, *, inverted: bool = False
) -> list[int]:
    """Return the output cells along an axis that change; inverted, those where something does not.

    With `lines`, the pairs of other axes, only those over the probe along these axes count: a
    PixelCNN looks to both sides in the rows above its own, to one side in its own.
    """
    mask = column.changed[pair.output]
    assert mask is not None
    if inverted:
        mask = ~mask
    for line in lines:
        first, last = column.probe.cells[line.input_axis]
        size = mask.shape[line.output_axis]
        low = math.ceil((first - line.own[1]) / float(line.stride) - SLACK)
        high = math.floor((last - line.own[0]) / float(line.stride) + SLACK)
        low = min(size, max(0, low))
        mask = mask.narrow(line.output_axis, low, max(0, min(size, high + 1) - low))
    cells = mask.movedim(pair.output_axis, 0).flatten(1) if mask.dim() > 1 else mask.unsqueeze(1)
    return [int(cell) for cell in cells.any(1).nonzero()]


def displacements(
    pair: AxisPair, lines: Sequence[AxisPair], column: Column
) -> list[tuple[float, float]]:
    """Return the displacements of the first and last cell of the block, for each changed output."""
    first, last = column.probe.cells[pair.input_axis]
    found = []
    for cell in changed_cells(pair, lines, column):
        place = float(pair.stride) * cell
        found.append((first - place, last - place))
    return found


def laws_of(columns: Sequence[Column], tensor: Tensor) -> list[Law]:
    """Return the laws for all outputs that keep their shape, along all axes of the columns.

    Each is looked for in the whole output, and in the line through the probe.

    Raises:
        CannotMeasureError: No output keeps its shape.
    """
    laws: list[Law] = []
    if not _fixed_outputs(columns):
        raise CannotMeasureError("the shapes of its outputs depend on the values of its inputs")
    for pair, lines in _pairs_and_lines(columns, tensor):
        views = [displacements(pair, lines, column) for column in columns]
        laws += limits_of(pair, lines, [view for view in views if view])
    return laws


def _pairs_and_lines(
    columns: Sequence[Column], tensor: Tensor
) -> Iterator[tuple[AxisPair, tuple[AxisPair, ...]]]:
    """Yield each pair twice: for the whole output, and for the line through the probe."""
    pairs = find_all_pairs(columns, tensor)
    for pair in pairs:
        others = []
        for other in pairs:
            if other.output == pair.output and other.input_axis != pair.input_axis:
                others.append(other)
        for lines in {(), tuple(others)}:
            yield pair, lines


def is_settled(columns: Sequence[Column], tensor: Tensor) -> bool:
    """True if more columns would show no law: outputs look to all sides, and at their own place."""
    if any(column.is_empty() for column in columns):
        return False
    found = {(pair.output, pair.output_axis) for pair in find_all_pairs(columns, tensor)}
    for output in _fixed_outputs(columns):
        for axis, (size, counts) in _counts_along(columns, output).items():
            has_parts = any(0 < count < NEARLY_ALL * size for count in counts)
            if has_parts and (output, axis) not in found:
                return False
    for pair, lines in _pairs_and_lines(columns, tensor):
        views = [displacements(pair, lines, column) for column in columns]
        start, end = pair.own
        entries = [entry for view in views for entry in view]
        looks_ahead = any(low > end + SLACK for low, _ in entries)
        looks_back = any(high < start - SLACK for _, high in entries)
        looks_at_own = any(low <= end + SLACK and high >= start - SLACK for low, high in entries)
        if pair.is_cut or not (looks_ahead and looks_back and looks_at_own):
            return False
    return True


def _counts_along(columns: Sequence[Column], output: int) -> dict[int, tuple[int, list[int]]]:
    """Return the size of each axis of an output, and how many of its cells each column changes."""
    counts = {}
    for axis, size in enumerate(_shape_of(columns, output)):
        if size >= MIN_CELLS:
            pair = AxisPair(input_axis=0, output=output, output_axis=axis)
            counts[axis] = (size, [len(changed_cells(pair, (), column)) for column in columns])
    return counts


def _shape_of(columns: Sequence[Column], output: int) -> torch.Size:
    mask = columns[0].changed[output]
    assert mask is not None
    return mask.shape


def _fixed_outputs(columns: Sequence[Column]) -> list[int]:
    """Return the outputs that keep their shape in all columns."""
    outputs = range(len(columns[0].changed))
    return [n for n in outputs if all(column.changed[n] is not None for column in columns)]


def find_all_pairs(columns: Sequence[Column], tensor: Tensor) -> list[AxisPair]:
    """Return the pairs of axes of all outputs that keep their shape."""
    pairs = []
    for output in _fixed_outputs(columns):
        pairs += find_pairs(columns, tensor, output)
    return pairs


def lost_axes(columns: Sequence[Column], tensor: Tensor) -> list[int]:
    """Return spatial axes along which parts of a map change, but do not move with the cells."""
    found = {(pair.output, pair.output_axis) for pair in find_all_pairs(columns, tensor)}
    lost = []
    for output in _fixed_outputs(columns):
        more_axes = len(_shape_of(columns, output)) - tensor.dim()
        for output_axis, (size, counts) in _counts_along(columns, output).items():
            axis = output_axis - more_axes
            is_probed = output_axis >= FIRST_SPATIAL and axis in columns[0].probe.cells
            has_parts = any(0 < count < NEARLY_ALL * size for count in counts)
            if is_probed and has_parts and (output, output_axis) not in found and axis not in lost:
                lost.append(axis)
    return lost


def find_pairs(columns: Sequence[Column], tensor: Tensor, output: int) -> list[AxisPair]:
    """Return, for each axis of an output, the axis of the input that belongs to it, if any.

    It is the one with which columns move. If outputs look at nearly all of a small map, none does;
    then a spatial axis of the same size in the same order belongs to it.
    """
    best: dict[int, AxisPair] = {}
    shape = _shape_of(columns, output)
    for axis in columns[0].probe.cells:
        for output_axis, size in enumerate(shape):
            if size < MIN_CELLS:
                continue
            pair = AxisPair(input_axis=axis, output=output, output_axis=output_axis)
            found = place_over_input(pair, tensor.shape[axis], size, columns)
            if found is None:
                continue
            is_in_place = len(shape) - output_axis == tensor.dim() - axis
            if found.correlation < MIN_CORRELATION_OF_OTHERS and not is_in_place:
                continue
            known = best.get(output_axis)
            if known is None or (found.correlation, is_in_place) > (known.correlation, False):
                best[output_axis] = found
    moving = {pair.input_axis for pair in best.values()}
    for axis in columns[0].probe.cells:
        output_axis = len(shape) - tensor.dim() + axis
        if axis in moving or output_axis < FIRST_SPATIAL:
            continue
        if shape[output_axis] == tensor.shape[axis] and output_axis not in best:
            pair = AxisPair(input_axis=axis, output=output, output_axis=output_axis)
            best[output_axis] = pair
    return list(best.values())


def place_over_input(
    pair: AxisPair, side: int, size: int, columns: Sequence[Column]
) -> AxisPair | None:
    """Return how output cells lie over input cells; None if no edge of a column moves with it.

    The stride is the slope of the edges. The place is known from the sizes, up to what was cut:

        side 7, size 3, stride 2:      0 0 1 1 2 2 .   to   . 0 0 1 1 2 2      own = 0 to 2
        side 6, size 4, stride 3/2:    input cells 0 to 2 are under outputs 0 and 1,
                                       3 to 5 under outputs 2 and 3            own = -1.5 to 2
    """
    moving = _moving_edge(pair, size, columns)
    if moving is None:
        return None
    correlation, slope, edge = moving

    def misfit(stride: Fraction) -> tuple[float, int, float]:
        # With the right stride, the edge moves beside the cells by its phases at most.
        phases = stride.numerator - 1 if stride.denominator <= MAX_UPSAMPLING else stride
        beside = [cell - float(stride) * place for cell, place in edge]
        excess = max(0.0, max(beside) - min(beside) - float(phases))
        return round(excess, 3), stride.denominator, abs(math.log(stride * size / side))

    # Standard error of a slope, relative to it; strides beyond three of them are no candidates.
    error = math.sqrt(max(0.0, 1 / correlation**2 - 1) / (len(edge) - 2))
    tolerance = LEAST_ERROR + 3 * error
    for strides in _strides(Fraction(side, size)):
        near = [some for some in strides if abs(math.log(some * slope)) <= tolerance]
        candidates = [some for some in near if some * size <= MAX_PADDED * side]
        if candidates:
            break
    else:
        return None
    stride = min(candidates, key=misfit)
    excess = misfit(stride)[0]
    if excess > MAX_EXCESS * max(1.0, float(stride)):
        return None
    cells = float(stride)
    first_place = min(0.0, cells - 1)
    last_place = max(0.0, cells - 1)
    if stride.denominator <= MAX_UPSAMPLING:
        first_place = -(stride.denominator - 1) * cells
        last_place = stride.numerator - 1
    cut = side - size * cells
    # More cells than that are padding: on both sides, as far as is known.
    padded = int(cut / 2) if cut <= -cells else 0
    own = (first_place + padded, last_place + max(0.0, cut))
    is_cut = cut >= max(1, cells)
    return replace(pair, stride=stride, own=own, is_cut=is_cut, correlation=correlation)


def _moving_edge(
    pair: AxisPair, size: int, columns: Sequence[Column]
) -> tuple[float, float, Edge] | None:
    """Return the edge that moves most evenly with the input cells: correlation, slope and edge.

    The border of the map may cut the other edge, and leave a part that moves in another way.
    """
    # Outputs may look at the whole map, but for a hole, which moves.
    for inverted in (False, True):
        moving = []
        for edge in _edges(pair, size, columns, inverted=inverted):
            slope = _slope(edge)
            if slope is not None:
                moving.append((*slope, edge))
        if moving:
            return max(moving)
    return None


def _edges(
    pair: AxisPair, size: int, columns: Sequence[Column], *, inverted: bool
) -> tuple[Edge, Edge]:
    """Return the edges of what changes, without those at the border of the map."""
    first_edge: Edge = []
    last_edge: Edge = []
    for column in columns:
        cells = changed_cells(pair, (), column, inverted=inverted)
        first, last = column.probe.cells[pair.input_axis]
        if cells and min(cells) > 0:
            first_edge.append((first, min(cells)))
        if cells and max(cells) < size - 1:
            last_edge.append((last, max(cells)))
    return first_edge, last_edge


def _strides(ratio: Fraction) -> list[list[Fraction]]:
    """Return the usual strides, and others, which networks have that use several."""
    usual = [*map(Fraction, range(1, MAX_STRIDE + 1))]
    usual += [Fraction(1, factor) for factor in range(2, MAX_UPSAMPLING + 1)]
    others = [ratio]
    for denominator in range(2, MAX_DENOMINATOR + 1):
        others += [Fraction(numerator, denominator) for numerator in range(1, MAX_STRIDE + 1)]
    return [usual, others]


def _slope(edge: Edge) -> tuple[float, float] | None:
    """Return the correlation of an edge with the input cells, and its slope; or None."""
    if len({cell for cell, _ in edge}) < MIN_CELLS:
        return None
    (x, xy), (_, y) = torch.tensor(edge, dtype=torch.float64).T.cov().tolist()
    if xy <= MIN_CORRELATION * math.sqrt(x * y):
        return None
    return xy / math.sqrt(x * y), xy / x


def limits_of(
    pair: AxisPair, lines: tuple[AxisPair, ...], views: Sequence[Sequence[Interval]]
) -> Iterator[Law]:
    """Yield what displacements must not become, given those that each column shows.

    1. Outputs look ahead of (behind) their own place only if they did before:

        x x x [x] . . .      looks back: the view ends in its own place, its centre lies before it
        . . x [x] x . .      ordinary: the centre lies in its own place
        . . x [x x] . .      so it does with a kernel of 3 and a stride of 2

    2. An own place that outputs do not look at, between cells that they look at, stays so:

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
    if pair.is_cut:  # which leaves the place open, so it is looked for in the middle
        start = end = centre
    last_back = []
    first_ahead = []
    for view in views:
        last_back.append(max((high for _, high in view if high < start - SLACK), default=-math.inf))
        first_ahead.append(min((low for low, _ in view if low > start - SLACK), default=math.inf))
    hole = (max(last_back), min(first_ahead))
    both = 0
    for back, ahead in zip(last_back, first_ahead, strict=True):
        both += math.isfinite(back) and math.isfinite(ahead)
    if hole[1] > end + SLACK and hole[1] - hole[0] > 1 + SLACK and 2 * both >= len(views):
        yield Law(reason=BLIND_SPOT, pair=pair, lines=lines, hole=hole)
