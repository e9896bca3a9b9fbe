"""What a sweep found, as data: a row for each combination of window and count or budget, and the
recommended size."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from ..depthwise.geometry import size_text
from ..options import MOST_WINDOW
from ..records import Record

EQUAL_ERRORS = (
    0.005  # relative errors that differ less say little of what training will make of them
)
Status = Literal["original", "done", "does not fit", "failed"]
Size = int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One combination."""

    size: Size  # cells, as `dilated_size` of the planning options
    kernel_count: int | None = None  # None: solved for the budget
    budget: float | None = None  # percent; None: the default, or a count is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one run, of several that were measured."""

    median: float
    first_quartile: float
    third_quartile: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination, or the dense original; None and empty stand for what is not known, or was
    not asked for."""

    asked: Asked | None  # None: the dense original
    status: Status
    reason: str | None = None  # one line; None where it is done
    command: str | None = None  # which converts so
    layers: int = 0  # replaced
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # all that occur
    kernel_counts: tuple[int, ...] = ()  # all that occur
    elements: int | None = None  # in all kernels
    params: int | None = None  # of the whole model
    macs: int | None = None  # of the whole model, for one image
    folded_bytes: int | None = (
        None  # of the whole model's weights and buffers, with constructed kernels
    )
    forward_ms: Timing | None = None  # a batch in eval mode
    step_ms: Timing | None = (
        None  # a batch forward and backward in training mode, and a step of SGD
    )
    kernel_error: float | None = None  # mean of |new - old| / |old| over the replaced kernels
    images: int | None = (
        None  # that were held out of the calibration, with which outputs were compared
    )
    output_error: float | None = (
        None  # |new - old| / |old| of the outputs for them; without any, for random images
    )
    same_top1: float | None = None  # share of them whose class is the same as before
    kl: float | None = None  # mean KL divergence of the class scores, in nats
    dominated: bool = False  # another row is no worse in anything, and better in something

    @property
    def window(self) -> str:
        """ "17x17"; "7x7..9x9" where there are several; as it was asked for where nothing was
        planned."""
        if self.asked is None:
            return "dense"
        sizes = self.dilated_sizes or (
            (self.asked.size,) if isinstance(self.asked.size, int) else self.asked.size,
        )
        return "..".join(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingSettings:
    """How the times of a sweep were measured."""

    device: str  # its name
    batch: int  # images
    seconds: float  # for all rows together, at least three rounds
    amp: bool  # bfloat16 autocast
    threads: int | None  # of the CPU; None on other devices
    torch: str  # version


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The recommended size."""

    row: int | None = None  # its index; None where there is none
    why: str
    command: str | None = None  # which converts so


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
    choice: Choice


Value = Callable[[SweepRow], Any]
_macs: Value = attrgetter("macs")


def step_ms(row: SweepRow) -> Any:
    return row.step_ms.median if row.step_ms else None


def _error(row: SweepRow) -> Any:
    """Of the outputs where they were compared with images, else of the kernels."""
    return row.output_error if row.images else row.kernel_error


def _known(rows: Sequence[SweepRow], value: Value) -> bool:
    return bool(rows) and all(value(row) is not None for row in rows)


def _sides(done: Sequence[SweepRow]) -> list[tuple[int, ...]]:
    """Sides of the rows' windows, along as many axes."""
    sizes = [row.asked.size for row in done if row.asked]
    axes = max((len(size) for size in sizes if isinstance(size, tuple)), default=1)
    return [(size,) * axes if isinstance(size, int) else size for size in sizes]


def compared(done: Sequence[SweepRow]) -> list[tuple[float, ...]]:
    """What rows that are done are compared by, where it is known of all; of each number, less is
    better."""
    times: list[Value] = [step_ms, lambda row: row.forward_ms and row.forward_ms.median]
    costs = [value for value in times if _known(done, value)] or [_macs] * _known(done, _macs)
    gain: Value = _error if _known(done, _error) else lambda row: -(row.elements or 0)
    values: list[Value] = [attrgetter("params"), *costs, gain]
    return [
        (*(-side for side in sides), *(value(row) for value in values))
        for row, sides in zip(done, _sides(done), strict=True)
    ]


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def with_dominated(rows: Sequence[SweepRow]) -> tuple[SweepRow, ...]:
    numbers = compared([row for row in rows if row.status == "done"])
    marks = iter([any(dominates(other, own) for other in numbers) for own in numbers])
    return tuple(
        replace(row, dominated=next(marks)) if row.status == "done" else row for row in rows
    )


def growth(row: SweepRow, original: SweepRow, value: Value) -> float:
    """In percent."""
    return float(100 * (value(row) / value(original) - 1))


def choose(rows: Sequence[SweepRow], slower: float) -> Choice:
    """The recommended size, and why, in one sentence; docs/choosing.md says how. The first row is
    the original."""
    original, done = rows[0], [row for row in rows if row.status == "done"]
    cost = next((value for value in (step_ms, _macs) if _known([original, *done], value)), None)
    if not done or cost is None:
        return Choice(why="neither MACs nor times are known" if done else "no row is done")
    params, folded = attrgetter("params"), attrgetter("folded_bytes")
    # In windows no larger than the old kernels, elements have nowhere new to go.
    grown = [row for row in done if folded(row) > folded(original)]
    most = max(params(original), min(map(params, grown or done)))
    pool = [row for row in grown or done if params(row) <= most]
    held = (
        "no more parameters than the original" if most == original.params else "fewest parameters"
    )
    limit = f"{slower:g} % more {'time for a training step' if cost is step_ms else 'MACs'}"
    within = [row for row in pool if growth(row, original, cost) <= slower]
    if not within:
        taken = min(pool, key=cost)
        larger = "windows larger than the old kernels" if grown else "those"
        percent = f"{growth(taken, original, cost):+.1f} %"
        why = f"it costs the least ({percent}) of {larger} with {held}; none has at most {limit}"
    else:
        sides_of = dict(zip(map(id, done), _sides(done), strict=True))
        within = [row for row in within if max(sides_of[id(row)]) <= MOST_WINDOW] or within
        fitted, merit = _known(done, _error), "largest window"
        if fitted:
            within = [
                row for row in within if _error(row) <= min(map(_error, within)) + EQUAL_ERRORS
            ]
        taken = max(within, key=lambda row: (math.prod(sides_of[id(row)]), row.elements))
        if fitted:
            of = "outputs for images held out" if taken.images else "kernels"
            merit = (
                f"least error of {of} ({_error(taken):.3f}; "
                f"of those within {EQUAL_ERRORS:g}, the largest window)"
            )
        why = (
            f"the {merit} with {held} and at most {limit} ({growth(taken, original, cost):+.1f} %)"
        )
    return Choice(row=rows.index(taken), why=why, command=taken.command)
