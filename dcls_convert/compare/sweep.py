"""What a sweep found, as data: a row for each combination of window and count or budget.

It also chooses the recommended size.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from ..depthwise.geometry import size_text
from ..options import MAX_WINDOW
from ..records import Record
from ..tables import as_html, as_text, span

# Relative errors that differ by less count as equal: training changes them more than that.
EQUAL_ERRORS = 0.005
# Why a sweep of a trained network recommends no size.
NO_GAIN = "without training, no row gains anything, as elements are fitted inside the old kernels"
RowStatus = Literal["original", "done", "does not fit", "failed"]
AskedSize = int | tuple[int, ...] | str  # cells, or a growth such as "+4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One combination."""

    size: AskedSize  # as `dilated_size` of the planning options
    kernel_count: int | None = None  # None: solved for the budget
    budget: float | None = None  # percent; None: the default, or a count is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one run: quartiles over several that were measured."""

    median: float
    first_quartile: float
    third_quartile: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination, or the dense original.

    A value that is None or empty is not known, or was not asked for.
    """

    asked: Asked | None  # None: the dense original
    status: RowStatus
    reason: str | None = None  # why the status is not "done"; one line
    # Command line, or call in Python, that converts with this combination.
    command: str | None = None
    layers: int = 0  # number of layers replaced
    layers_beyond_map: int = 0  # whose windows have cells that never meet the map
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # all that occur, sorted
    kernel_counts: tuple[int, ...] = ()  # all that occur, sorted
    elements: int | None = None  # in all kernels
    params: int | None = None  # of the whole model
    macs: int | None = None  # of the whole model, for one image
    # Bytes of the whole model's weights and buffers, with constructed kernels.
    folded_bytes: int | None = None
    forward_ms: Timing | None = None  # a batch in eval mode
    # A batch forward and backward in training mode, and a step of SGD.
    step_ms: Timing | None = None
    kernel_error: float | None = None  # mean of |new - old| / |old| over the replaced kernels
    # Number of images held out of the calibration, for which outputs were compared.
    images: int | None = None
    # |new - old| / |old| of the outputs for the held-out images; without any, for random images.
    output_error: float | None = None
    same_top1: float | None = None  # share of the held-out images that keep their class
    kl: float | None = None  # mean KL divergence of the class scores, in nats
    dominated: bool = False  # another row is no worse in anything, and better in something

    @property
    def window(self) -> str:
        """ "17x17", or "7x7..9x9" for several windows; of a growth, "+4 (7x7..9x9)".

        As asked for if nothing was planned.
        """
        if self.asked is None:
            return "dense"
        size = self.asked.size
        planned = span(self.dilated_sizes, size_text)
        if isinstance(size, str):
            if not planned:
                return size
            return f"{size} ({planned})"
        if planned:
            return planned
        if isinstance(size, int):
            return str(size)
        return size_text(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingSettings:
    """How the times of a sweep were measured."""

    device: str  # its name
    batch: int  # images
    seconds: float  # for all rows together; three rounds are measured even if they take longer
    amp: bool  # bfloat16 autocast
    threads: int | None  # of the CPU; None on other devices
    torch: str  # version


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended size."""

    row: int | None = None  # its index; None if no row can be recommended
    why: str
    command: str | None = None  # command line, or call in Python, that converts to this size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Record):
    """All rows, the dense original first."""

    format: int = 1
    model: str
    input_size: tuple[int, ...] | None
    macs_note: str | None = None  # why MACs are not known
    rows: tuple[SweepRow, ...]
    timing: TimingSettings | None = None
    slower: float  # percent by which the cost of the recommended size may grow
    interrupted: bool = False  # rows are missing, or parts of them
    choice: Recommendation

    def __rich__(self) -> Any:
        from ..views.sweep import python_view

        return python_view(self)

    __str__ = as_text
    _repr_html_ = as_html


Value = Callable[[SweepRow], Any]
_params: Value = attrgetter("params")
_macs: Value = attrgetter("macs")
_folded_bytes: Value = attrgetter("folded_bytes")


def step_ms(row: SweepRow) -> Any:
    """Median time of a training step; None if it was not measured."""
    if row.step_ms is None:
        return None
    return row.step_ms.median


def _forward_ms(row: SweepRow) -> Any:
    if row.forward_ms is None:
        return None
    return row.forward_ms.median


def _error(row: SweepRow) -> Any:
    """The output error if outputs for images were compared, else the kernel error."""
    if row.images:
        return row.output_error
    return row.kernel_error


def _fewer_elements(row: SweepRow) -> Any:
    """A number that is less for more elements."""
    return -(row.elements or 0)


def _is_known(value: Value, rows: Sequence[SweepRow]) -> bool:
    """Whether there are rows, and all of them have the value."""
    return bool(rows) and all(value(row) is not None for row in rows)


def done_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows that could be planned; not the original."""
    return [row for row in rows if row.status == "done"]


def _at_most(limit: float, value: Value, rows: Sequence[SweepRow]) -> list[SweepRow]:
    return [row for row in rows if value(row) <= limit]


def _window_sides(done: Sequence[SweepRow]) -> list[tuple[int, ...]]:
    """Sides of the smallest and of the largest window of each row, equally many in all rows.

    Both count: of two rows with the same largest window, one may give smaller kernels a smaller
    window.
    """
    axes = 1
    for row in done:
        axes = max(axes, *map(len, row.dilated_sizes))
    all_sides: list[tuple[int, ...]] = []
    for row in done:
        sides: list[int] = []
        for window in (row.dilated_sizes[0], row.dilated_sizes[-1]):
            missing_axes = axes - len(window)
            sides += [*window, *itertools.repeat(window[-1], missing_axes)]
        all_sides.append(tuple(sides))
    return all_sides


def numbers_to_compare(done: Sequence[SweepRow]) -> list[tuple[float, ...]]:
    """The numbers by which the rows are compared, for each row; of each number, less is better.

    They are the sides of the windows negated, parameters, times (or else MACs), and the error (or
    else the number of elements negated). A number that some row lacks is not compared.
    """
    costs: list[Value] = []
    for time in (step_ms, _forward_ms):
        if _is_known(time, done):
            costs.append(time)
    if not costs and _is_known(_macs, done):
        costs.append(_macs)
    loss = _error if _is_known(_error, done) else _fewer_elements
    numbers: list[tuple[float, ...]] = []
    for row, sides in zip(done, _window_sides(done), strict=True):
        row_numbers = [-side for side in sides]
        for value in (_params, *costs, loss):
            row_numbers.append(value(row))
        numbers.append(tuple(row_numbers))
    return numbers


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is no worse in anything, and better in something; less is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def with_dominated(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows, with `dominated` set in those that are done."""
    numbers = numbers_to_compare(done_rows(rows))
    numbers_left = iter(numbers)
    marked = []
    for row in rows:
        if row.status == "done":
            own = next(numbers_left)
            is_dominated = any(dominates(other, own) for other in numbers)
            row = replace(row, dominated=is_dominated)
        marked.append(row)
    return tuple(marked)


def percent_more(row: SweepRow, original: SweepRow, value: Value) -> float:
    """Percent by which a row's value exceeds the original's."""
    return float(100 * (value(row) / value(original) - 1))


def choose(rows: Sequence[SweepRow], slower: float) -> Recommendation:
    """The recommended size and the reason in one sentence, by the rules in docs/choosing.md.

    Args:
        rows: The original first.
        slower: Percent by which the training step's time, or else the MACs, may grow.
    """
    original = rows[0]
    done = done_rows(rows)
    if not done:
        return Recommendation(why="no row is done")
    if _is_known(step_ms, [original, *done]):
        cost: Value = step_ms
        limit_text = f"{slower:g} % more time for a training step"
    elif _is_known(_macs, [original, *done]):
        cost = _macs
        limit_text = f"{slower:g} % more MACs"
    else:
        return Recommendation(why="neither MACs nor times are known")
    if _is_known(_error, done):
        least = min(map(_error, done))
        if max(map(_error, done)) - least <= EQUAL_ERRORS:
            return Recommendation(why=f"{NO_GAIN} (all errors are about {least:.3f})")

    # Windows that do not grow give elements nowhere new to go. A folded kernel has as many cells as
    # its window, so if its weights take more bytes, a row has a larger window somewhere.
    grown = [row for row in done if _folded_bytes(row) > _folded_bytes(original)]
    candidates = _with_most_layers(grown or done)
    min_params = min(map(_params, candidates))
    if min_params <= _params(original):
        small = _at_most(_params(original), _params, candidates)
        params_text = "no more parameters than the original"
    else:
        small = _at_most(min_params, _params, candidates)
        params_text = "fewest parameters"

    affordable = _at_most(slower, lambda row: percent_more(row, original, cost), small)
    if affordable:
        taken, merit = _best(affordable, done)
        percent = f"{percent_more(taken, original, cost):+.1f} %"
        why = f"the {merit} with {params_text} and at most {limit_text} ({percent})"
    else:
        taken = min(small, key=cost)
        percent = f"{percent_more(taken, original, cost):+.1f} %"
        larger = "windows larger than the old kernels" if grown else "those"
        which = f"of {larger} with {params_text}; none has at most {limit_text}"
        why = f"it costs the least ({percent}) {which}"
    return Recommendation(row=rows.index(taken), why=why, command=taken.command)


def _with_most_layers(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows that convert most layers; those that others refuse would make these look cheap."""
    most = max(row.layers for row in rows)
    return [row for row in rows if row.layers == most]


def _best(affordable: Sequence[SweepRow], done: Sequence[SweepRow]) -> tuple[SweepRow, str]:
    """The row with the least error, or if errors are not known, the largest window; and this merit.

    Rows with windows above MAX_WINDOW are taken only if there is no other.
    """
    sides_of = {}
    for row, sides in zip(done, _window_sides(done), strict=True):
        sides_of[id(row)] = sides
    best = _at_most(MAX_WINDOW, lambda row: max(sides_of[id(row)]), affordable) or affordable
    has_errors = _is_known(_error, done)
    if has_errors:
        best = _at_most(min(map(_error, best)) + EQUAL_ERRORS, _error, best)
    taken = max(best, key=lambda row: (math.prod(sides_of[id(row)]), row.elements))
    if not has_errors:
        return taken, "largest window"
    compared_by = "outputs for images held out" if taken.images else "kernels"
    merit = (
        f"least error of {compared_by} ({_error(taken):.3f}; "
        f"of those within {EQUAL_ERRORS:g}, the largest window)"
    )
    return taken, merit
