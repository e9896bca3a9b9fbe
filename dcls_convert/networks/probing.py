"""Fill tables: change cells of a network's inputs until the outputs show their dependence."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import Tensor

from ..running.arguments import Arguments
from ..text import join_with_and
from .laws import Law, find_pairs, is_settled, lost_axes
from .table import MIN_CELLS, DependenceColumn, DependenceTable, Probe, changes

# Probes for a group of axes. Each probe is one run of the network.
PROBES = 8
MAX_PROBES = 32  # to meet all phases of strides
FIRST_PROBES = 4  # enough for most networks that look to all sides
MAX_BORDER_CELLS = 24  # cells probed near a border, since padding by reflection repeats them

RunOutputs = Callable[[Arguments], list[Tensor]]  # returns the outputs as real numbers


class CannotMeasureError(Exception):
    """The network cannot be measured, or not along some axes; the message says why."""


def tables_of(
    run: RunOutputs, arguments: Arguments, before: list[Tensor]
) -> tuple[list[DependenceTable], str]:
    """Return a table for each group of axes, and a text on the axes that could not be measured.

    The groups are the first axis, the second axis, and all later axes together. So no notion of a
    batch is needed, and any axis may be time.

    Raises:
        CannotMeasureError: No change of the inputs changes an output.
    """
    tables = []
    problems = []
    unused = 0  # tables of inputs without an effect
    for index, tensor in enumerate(arguments.tensors()):
        for group in (slice(0, 1), slice(1, 2), slice(2, None)):
            axes = [axis for axis in range(tensor.dim())[group] if tensor.shape[axis] >= MIN_CELLS]
            if not axes:
                continue
            table = fill_table(run, arguments, before, index, axes)
            whole_input = Probe(input=index, cells={})
            if not _has_effects(table.columns):
                if run_probe(run, arguments, before, whole_input).is_empty():
                    unused += 1
                    continue
            tables.append(table)
            problem = _problem(table, index)
            if problem is not None:
                problems.append(problem)
    if unused and not tables:
        raise CannotMeasureError(
            "its outputs do not change with its inputs, or all values of these are equal"
        )
    return tables, "; ".join(problems)


def _problem(table: DependenceTable, index: int) -> str | None:
    """Return the problem of a table that shows no dependence, with its axes; or None."""
    axes = table.axes
    lost = lost_axes(table)
    if not table.shapes():
        problem = "the shapes of outputs depend on the values"
    elif not _has_effects(table.columns):
        problem = "most changed cells change no output"
    elif lost:
        axes = lost
        problem = "outputs do not move with the changed cells"
    else:
        return None
    where = f"axis {axes[0]}"
    if len(axes) > 1:
        where = f"axes {join_with_and([str(axis) for axis in axes])}"
    return f"along {where} of input {index}, {problem}"


def _has_effects(columns: Sequence[DependenceColumn]) -> bool:
    return 2 * sum(column.is_empty() for column in columns) <= len(columns)


def run_probe(
    run: RunOutputs, arguments: Arguments, before: list[Tensor], probe: Probe
) -> DependenceColumn:
    """Run the network with changed cells; `before` are its outputs for unchanged inputs."""
    return DependenceColumn(probe, changes(before, run(probe.changed(arguments))))


def fill_table(
    run: RunOutputs, arguments: Arguments, before: list[Tensor], index: int, axes: Sequence[int]
) -> DependenceTable:
    """Fill a table: the size of blocks doubles until half of the blocks change an output.

        x . x . x .     Only every second cell is read: a block of one cell may miss the read
        [.]   [. x]     cells, a block of two cells contains one.

    If the table shows strides, it is filled again with more blocks, to meet all their phases.
    """
    shape = arguments.tensors()[index].shape
    lengths = [shape[axis] for axis in axes]

    def column_of(cells: Sequence[tuple[int, int]]) -> DependenceColumn:
        probe = Probe(input=index, cells=dict(zip(axes, cells, strict=True)))
        return run_probe(run, arguments, before, probe)

    size = 1
    while True:
        blocks = spread_blocks(lengths, size, [])
        table = DependenceTable(shape, [column_of(cells) for cells in blocks[:FIRST_PROBES]])
        if is_settled(table):
            return table
        table.columns.extend(column_of(cells) for cells in blocks[FIRST_PROBES:])
        if _has_effects(table.columns):
            break
        size *= 2
        if size > max(lengths) // 4:
            return table
    strides = [pair.stride.numerator for pair in find_pairs(table)]
    if lost_axes(table):
        strides.append(MAX_PROBES)
    more_blocks = spread_blocks(lengths, size, strides)
    if more_blocks == blocks:
        return table
    return DependenceTable(shape, [column_of(cells) for cells in more_blocks])


def columns_at_borders(
    run: RunOutputs,
    arguments: Arguments,
    before: list[Tensor],
    table: DependenceTable,
    laws: Sequence[Law],
    extents: Collection[int],
) -> list[DependenceColumn]:
    """Return columns near the ends of axes with laws, where padding may reflect or wrap around.

    Padding before the first cell may repeat later cells: it reflects the first cells, or wraps
    around to the last cell. Near a border, such looking ahead breaks no law. An output that sees a
    cell there may also see cells nearer to the border. So each column includes the outputs that
    change with cells farther from the border.

    Args:
        run, arguments, before: The network's run, its arguments, and its outputs for them.
        table: The table.
        laws: The laws of the table.
        extents: Extents of the kernels. Padding has at most one cell less.
    """
    border = min(2 * max(extents), MAX_BORDER_CELLS)
    sides = {(law.pair.input_axis, law.side) for law in laws}
    middle = table.columns[0].probe
    columns: list[DependenceColumn] = []
    for axis, side in sorted(sides):
        last = table.input_shape[axis] - 1
        near = range(min(border, last // 2))
        cells = [last, *reversed(near)]
        if side == "ahead":
            cells = [last - cell for cell in cells]
        farther = None
        for cell in cells:
            probe = replace(middle, cells={**middle.cells, axis: (cell, cell)})
            column = run_probe(run, arguments, before, probe)
            farther = column if farther is None else column.joined(farther)
            columns.append(farther)
    return columns


def spread_blocks(
    lengths: Sequence[int], size: int, strides: Sequence[int]
) -> list[tuple[tuple[int, int], ...]]:
    """Spread blocks over the middle half of the axes; return their first and last cells.

    The step between blocks has no factor in common with a stride. So the blocks meet all phases of
    the strides, as far as there is room.
    """
    count = PROBES
    while count < MAX_PROBES and count < 2 * max(strides, default=0):
        count *= 2
    numbers = [*range(0, count, 2), *range(1, count, 2)]  # the first blocks are far apart
    blocks_along = []
    for index, map_length in enumerate(lengths):
        factor = 2 * index + 1  # a different order for each axis, to tell them apart
        length = min(size, map_length)
        last = map_length - length
        room = last // 2 + 1
        step = max(1, (room // count - 1) | 1)  # odd, for strides that are not known yet
        while any(math.gcd(step, stride) > 1 for stride in strides):
            step -= 2
        places = min(count, room)
        first = (last - step * (places - 1)) // 2
        starts = [first + step * (number * factor % count % places) for number in numbers]
        blocks_along.append([(start, start + length - 1) for start in starts])
    return list(dict.fromkeys(zip(*blocks_along, strict=True)))
