"""What a sweep found, as data: a row for each combination of window and count or budget.

It also says which rows others dominate.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..geometry import size_text
from ..records import Record
from ..tables import as_html, as_text
from ..text import span

RowStatus = Literal["original", "done", "does not fit", "failed"]
RequestedSize = int | tuple[int, ...] | str  # cells, or a growth such as "+4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One combination."""

    size: RequestedSize  # as `dilated_size` of the planning options
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
    """One combination, or the original.

    A value that is None or empty is not known, or was not asked for.
    """

    asked: Combination | None  # None: the original
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

    @property
    def median_forward_ms(self) -> float | None:
        if self.forward_ms is None:
            return None
        return self.forward_ms.median

    @property
    def median_step_ms(self) -> float | None:
        if self.step_ms is None:
            return None
        return self.step_ms.median

    @property
    def error(self) -> float | None:
        """The output error if outputs for images were compared, else the kernel error."""
        if self.images:
            return self.output_error
        return self.kernel_error


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
    why: str  # in words; without a row, why there is none
    command: str | None = None  # command line, or call in Python, that converts to this size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Record):
    """All rows, the original first."""

    format: int = 1
    model: str
    input_size: tuple[int, ...] | None
    macs_note: str | None = None  # why MACs are not known
    rows: tuple[SweepRow, ...]
    timing: TimingSettings | None = None
    slower: float  # percent that the recommended size may add to the original's cost
    interrupted: bool = False  # rows are missing, or parts of them
    choice: Recommendation

    def __rich__(self) -> Any:
        from ..views.sweep import python_view

        return python_view(self)

    __str__ = as_text
    _repr_html_ = as_html


def done_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows that could be planned; not the original."""
    return [row for row in rows if row.status == "done"]


def values_if_complete(values: Iterable[float | None]) -> list[float] | None:
    """The values of rows; None if there are no rows, or if some row has none."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return known or None


def window_sides(done: Sequence[SweepRow]) -> list[tuple[int, ...]]:
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


def objectives(done: Sequence[SweepRow]) -> list[tuple[float, ...]]:
    """The numbers by which the rows are compared, for each row; of each number, less is better.

    They are the sides of the windows negated, parameters, times (or else MACs), and the error (or
    else the number of elements negated). A number that some row lacks is not compared.
    """
    forward_ms = values_if_complete(row.median_forward_ms for row in done)
    step_ms = values_if_complete(row.median_step_ms for row in done)
    macs = values_if_complete(row.macs for row in done)
    compares_macs = forward_ms is None and step_ms is None
    errors = values_if_complete(row.error for row in done)
    numbers: list[tuple[float, ...]] = []
    for index, (row, sides) in enumerate(zip(done, window_sides(done), strict=True)):
        assert row.params is not None
        row_numbers: list[float] = [-side for side in sides]
        row_numbers.append(row.params)
        if step_ms is not None:
            row_numbers.append(step_ms[index])
        if forward_ms is not None:
            row_numbers.append(forward_ms[index])
        if compares_macs and macs is not None:
            row_numbers.append(macs[index])
        if errors is not None:
            row_numbers.append(errors[index])
        else:
            row_numbers.append(-(row.elements or 0))
        numbers.append(tuple(row_numbers))
    return numbers


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is no worse in anything, and better in something; less is better."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def mark_dominated(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """The rows, with `dominated` set in those that are done."""
    numbers = objectives(done_rows(rows))
    numbers_left = iter(numbers)
    marked = []
    for row in rows:
        if row.status == "done":
            own = next(numbers_left)
            is_dominated = any(dominates(other, own) for other in numbers)
            row = replace(row, dominated=is_dominated)
        marked.append(row)
    return tuple(marked)


def percent_more(value: float, original: float) -> float:
    """Percent by which a value exceeds the original's."""
    return 100 * (value / original - 1)
