"""The results of a sweep: one row for each combination of a window and a count or budget.

Rows that are dominated by others are marked.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..geometry import size_text
from ..records import Record
from ..tables import as_html, as_text
from ..text import range_text

RowStatus = Literal["original", "done", "does not fit", "failed"]
RequestedSize = int | tuple[int, ...] | str  # cells, or a growth such as "+4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A window, with a count or a budget."""

    size: RequestedSize  # `dilated_size` of the planning options
    kernel_count: int | None = None  # None: solved for the budget
    budget: float | None = None  # percent; None for the default, or if a count is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Quartiles over several measurements, in milliseconds."""

    median: float
    first_quartile: float
    third_quartile: float
    runs: int  # number of measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination, or the original.

    A value that is None or empty is unknown, or was not requested.
    """

    asked: Combination | None  # None for the original
    status: RowStatus
    reason: str | None = None  # why the status is not "done"; one line
    # Command line, or Python call, that converts with this combination.
    command: str | None = None
    layers: int = 0  # number of layers replaced
    layers_beyond_map: int = 0  # number of layers whose windows have cells that never meet the map
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # distinct values, sorted
    kernel_counts: tuple[int, ...] = ()  # distinct values, sorted
    elements: int | None = None  # in all kernels
    params: int | None = None  # of the whole model
    macs: int | None = None  # of the whole model, for one image
    # Bytes of the whole model's weights and buffers, with constructed kernels.
    folded_bytes: int | None = None
    forward_ms: Timing | None = None  # one batch in eval mode
    # One batch forward and backward in training mode, and a step of SGD.
    step_ms: Timing | None = None
    kernel_error: float | None = None  # mean of |new - old| / |old| over the replaced kernels
    # Number of images, held out of the calibration, for which outputs were compared.
    images: int | None = None
    # |new - old| / |old| of the outputs for the held-out images, or for random images without any.
    output_error: float | None = None
    same_top1: float | None = None  # share of the held-out images that keep their class
    kl: float | None = None  # mean KL divergence of the class scores, in nats
    dominated: bool = False  # another row is no worse in any objective, and better in one

    @property
    def window(self) -> str:
        """ "17x17", or "7x7..9x9" for several windows; for a growth, "+4 (7x7..9x9)".

        If nothing was planned, it is the requested size.
        """
        if self.asked is None:
            return "original"
        size = self.asked.size
        planned = range_text(self.dilated_sizes, size_text)
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

    device: str  # name
    batch: int  # number of images
    seconds: float  # for all rows together; three rounds are measured even if they take longer
    amp: bool  # bfloat16 autocast
    threads: int | None  # CPU threads; None on other devices
    torch: str  # version


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended size."""

    row: int | None = None  # index of the row; None if none is recommended
    why: str  # the reason, in words; without a row, why none is recommended
    command: str | None = None  # command line, or Python call, that converts to this size


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
    interrupted: bool = False  # if so, rows or parts of them are missing
    choice: Recommendation

    def __rich__(self) -> Any:
        from ..views.sweep import python_view

        return python_view(self)

    __str__ = as_text
    _repr_html_ = as_html


def done_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the rows that were planned and did not fail, without the original."""
    return [row for row in rows if row.status == "done"]


def values_if_complete(values: Iterable[float | None]) -> list[float] | None:
    """Return the values of rows; None if there are no rows or any value is None."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return known or None


def window_sides(done: Sequence[SweepRow]) -> list[tuple[int, ...]]:
    """Return the sides of the smallest and largest window of each row; all rows get equally many.

    Both windows matter: of two rows with the same largest window, one may have a smaller window for
    smaller kernels.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """What the rows of a sweep are compared by."""

    names: tuple[str, ...]  # in words, such as "parameters"
    # For each row, its values; less is better. A name may stand for several values.
    values: list[tuple[float, ...]]


def objectives(done: Sequence[SweepRow]) -> Objectives:
    """Return the values by which the rows are compared.

    They are the sides of the windows (negated), the parameters, the times or else the MACs, and the
    error or else the number of elements (negated). A value that any row lacks is left out.
    """
    names = ["window", "parameters"]
    # One column for each quantity, with an entry for each row.
    columns: list[Sequence[float]] = []
    for sides in zip(*window_sides(done), strict=True):
        columns.append([-side for side in sides])
    columns.append([_params(row) for row in done])
    forward_ms = values_if_complete(row.median_forward_ms for row in done)
    step_ms = values_if_complete(row.median_step_ms for row in done)
    times = [column for column in (step_ms, forward_ms) if column is not None]
    macs = values_if_complete(row.macs for row in done)
    if times:
        names.append("times")
        columns += times
    elif macs is not None:
        names.append("MACs")
        columns.append(macs)
    errors = values_if_complete(row.error for row in done)
    if errors is None:
        names.append("number of elements")
        columns.append([-(row.elements or 0) for row in done])
    else:
        names.append("error of outputs" if all(row.images for row in done) else "error of kernels")
        columns.append(errors)
    return Objectives(names=tuple(names), values=list(zip(*columns, strict=True)))


def _params(row: SweepRow) -> int:
    assert row.params is not None
    return row.params


def dominates(values: Sequence[float], others: Sequence[float]) -> bool:
    """True if `values` are nowhere worse than `others`, and somewhere better; less is better."""
    if values == others:
        return False
    return all(value <= other for value, other in zip(values, others, strict=True))


def mark_dominated(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    """Return the rows, with `dominated` set in those that are done."""
    values_of_done = objectives(done_rows(rows)).values
    remaining_values = iter(values_of_done)
    marked = []
    for row in rows:
        if row.status == "done":
            own_values = next(remaining_values)
            is_dominated = any(dominates(values, own_values) for values in values_of_done)
            row = replace(row, dominated=is_dominated)
        marked.append(row)
    return tuple(marked)


def percent_increase(value: float, original: float) -> float:
    """Return the percentage by which a value exceeds the original's."""
    return 100 * (value / original - 1)
