"""Recommend a size from the rows of a sweep, by the rules in docs/choosing.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..options import MAX_WINDOW
from .results import (
    Recommendation,
    SweepRow,
    done_rows,
    percent_increase,
    values_if_complete,
    window_sides,
)

# Relative errors that differ by less count as equal, since training changes them by more.
ERROR_TOLERANCE = 0.005

Cost = Literal["step time", "MACs"]
Reason = Literal[
    # No row is recommended:
    "no row is done",
    "no cost is known",
    "no row gains",  # the errors of a trained network are equal in all rows
    # A row is recommended:
    "least error",
    "largest window",  # if errors are not known
    "least cost",  # if every row costs too much
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The recommended row, and the reason for it."""

    reason: Reason
    row: SweepRow | None = None  # None if no row is recommended
    # Set only if a row is recommended:
    cost: Cost = "MACs"  # the cost by which rows were compared
    added_percent: float = 0.0  # by how much the row costs more than the original
    # True if only rows with windows larger than the old kernels were compared. False if there are
    # none.
    only_grown: bool = False
    # True if only rows with at most the parameters of the original were compared. False if all rows
    # have more; those with the fewest were compared then.
    keeps_params: bool = False


def recommend(rows: Sequence[SweepRow], max_added_percent: float) -> Recommendation:
    """Recommend a size, and give the reason in one sentence.

    Args:
        rows: All rows, the original first.
        max_added_percent: Percent by which the time of a training step may grow. If times are not
            known, the limit is for the MACs.
    """
    decision = decide(rows, max_added_percent)
    why = _explain(decision, rows, max_added_percent)
    if decision.row is None:
        return Recommendation(why=why)
    return Recommendation(row=rows.index(decision.row), why=why, command=decision.row.command)


def decide(rows: Sequence[SweepRow], max_added_percent: float) -> Decision:
    """Find the recommended row; takes the same arguments as `recommend`."""
    original = rows[0]
    done = done_rows(rows)
    if not done:
        return Decision(reason="no row is done")
    cost = _known_cost([original, *done])
    if cost is None:
        return Decision(reason="no cost is known")
    errors = values_if_complete(row.error for row in done)
    if errors is not None and max(errors) - min(errors) <= ERROR_TOLERANCE:
        return Decision(reason="no row gains")

    grown = _with_grown_windows(done, original)
    # A row in which the size does not fit some layers would look cheap. Keep the rows that convert
    # the most layers.
    candidates = _with_most_layers(grown or done)
    fewest_params = min(map(_params, candidates))
    max_params = max(fewest_params, _params(original))
    within_params = [row for row in candidates if _params(row) <= max_params]

    def added_percent(row: SweepRow) -> float:
        return percent_increase(_cost_of(row, cost), _cost_of(original, cost))

    affordable = [row for row in within_params if added_percent(row) <= max_added_percent]
    reason: Reason = "least cost"
    if affordable and errors is not None:
        reason = "least error"
        recommended = _best(affordable, done, by_error=True)
    elif affordable:
        reason = "largest window"
        recommended = _best(affordable, done, by_error=False)
    else:
        recommended = min(within_params, key=lambda row: _cost_of(row, cost))
    return Decision(
        reason=reason,
        row=recommended,
        cost=cost,
        added_percent=added_percent(recommended),
        only_grown=bool(grown),
        keeps_params=fewest_params <= _params(original),
    )


def _known_cost(rows: Sequence[SweepRow]) -> Cost | None:
    """Return the cost that is known for all rows; None if neither is."""
    if values_if_complete(row.median_step_ms for row in rows) is not None:
        return "step time"
    if values_if_complete(row.macs for row in rows) is not None:
        return "MACs"
    return None


def _with_most_layers(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Keep the rows that convert the most layers."""
    most_layers = max(row.layers for row in rows)
    return [row for row in rows if row.layers == most_layers]


def _cost_of(row: SweepRow, cost: Cost) -> float:
    value: float | None = row.macs
    if cost == "step time":
        value = row.median_step_ms
    assert value is not None
    return value


def _params(row: SweepRow) -> int:
    assert row.params is not None
    return row.params


def _with_grown_windows(done: Sequence[SweepRow], original: SweepRow) -> list[SweepRow]:
    """Keep the rows with windows larger than the old kernels; others give elements no new places.

    A folded kernel has as many cells as its window, so in these rows the folded model has more
    bytes than the original.
    """
    assert original.folded_bytes is not None
    grown = []
    for row in done:
        assert row.folded_bytes is not None
        if row.folded_bytes > original.folded_bytes:
            grown.append(row)
    return grown


def _best(affordable: Sequence[SweepRow], done: Sequence[SweepRow], *, by_error: bool) -> SweepRow:
    """Return the row with the largest window; with `by_error`, among rows with the least error.

    Rows with windows above MAX_WINDOW are used only if there are no others.
    """
    sides_of = {}
    for row, sides in zip(done, window_sides(done), strict=True):
        sides_of[id(row)] = sides
    candidates = [row for row in affordable if max(sides_of[id(row)]) <= MAX_WINDOW]
    candidates = candidates or list(affordable)
    if by_error:
        max_error = min(_error(row) for row in candidates) + ERROR_TOLERANCE
        candidates = [row for row in candidates if _error(row) <= max_error]
    return max(candidates, key=lambda row: (math.prod(sides_of[id(row)]), row.elements))


def _error(row: SweepRow) -> float:
    assert row.error is not None
    return row.error


def _explain(decision: Decision, rows: Sequence[SweepRow], max_added_percent: float) -> str:
    """Return the reason for a decision as one sentence, without its period."""
    row = decision.row
    if row is None:
        return _explain_none(decision.reason, rows)
    params = "fewest parameters"
    if decision.keeps_params:
        params = "no more parameters than the original"
    limit = f"{max_added_percent:g} % more MACs"
    if decision.cost == "step time":
        limit = f"{max_added_percent:g} % more time for a training step"
    added = f"{decision.added_percent:+.1f} %"
    if decision.reason == "least cost":
        windows = "windows larger than the old kernels" if decision.only_grown else "those"
        return f"it costs the least ({added}) of {windows} with {params}; none has at most {limit}"
    merit = "largest window"
    if decision.reason == "least error":
        compared = "outputs for images held out" if row.images else "kernels"
        merit = (
            f"least error of {compared} ({_error(row):.3f}; "
            f"of those within {ERROR_TOLERANCE:g}, the largest window)"
        )
    return f"the {merit} with {params} and at most {limit} ({added})"


def _explain_none(reason: Reason, rows: Sequence[SweepRow]) -> str:
    """Say why no row is recommended."""
    if reason == "no row gains":
        least = min(_error(row) for row in done_rows(rows))
        return (
            "without training, no row gains anything, as elements are fitted inside the old "
            f"kernels (all errors are about {least:.3f})"
        )
    if reason == "no cost is known":
        return "neither MACs nor times are known"
    return "no row is done"
