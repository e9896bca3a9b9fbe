"""Recommend a size from the rows of a sweep, by the rules in docs/choosing.md."""

from collections.abc import Sequence

from ..options import MAX_WINDOW
from .rows import Recommendation, SweepRow, done_rows, percent_increase

TRAINED = (
    "without further training, converting a trained network gains nothing and adds MACs, as "
    "elements are fitted inside the old kernels; it is a starting point for training"
)


def recommend(
    rows: Sequence[SweepRow], max_added_percent: float, *, trained: bool
) -> Recommendation:
    """Recommend a size, and give the reason in one sentence.

    Args:
        rows: All rows, the original first.
        max_added_percent: Percent that the recommended size may add to the MACs.
        trained: True if the network keeps its weights; no size is recommended then.
    """
    original = rows[0]
    done = done_rows(rows)
    if trained:
        return Recommendation(why=TRAINED)
    if not done:
        return Recommendation(why="no size fits")
    if original.macs is None:
        return Recommendation(why="MACs are not known")
    # MACs grow with the cells of the windows. A window of the old kernel's size gives elements no
    # new places.
    grown = [row for row in done if _macs(row) > original.macs]
    if not grown:
        return Recommendation(why="no window is larger than the old kernels")
    candidates = _with_fewest_params(_with_most_layers(grown), original)
    affordable = []
    for row in candidates:
        if percent_increase(_macs(row), original.macs) <= max_added_percent:
            affordable.append(row)
    if affordable:
        recommended = _largest_window(affordable)
    else:
        recommended = min(candidates, key=lambda row: (_macs(row), -(row.elements or 0)))

    params = "fewest parameters"
    if _params(recommended) <= _params(original):
        params = "no more parameters than the original"
    limit = f"{max_added_percent:g} % more MACs"
    added = f"{percent_increase(_macs(recommended), original.macs):+.1f} %"
    if affordable:
        why = f"the largest window with {params} and at most {limit} ({added})"
    else:
        why = (
            f"it costs the least ({added}) of windows larger than the old kernels with {params}; "
            f"none has at most {limit}"
        )
    return Recommendation(row=rows.index(recommended), why=why, command=recommended.command)


def _with_most_layers(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Keep the rows that convert the most layers.

    A row in which the size does not fit some layers would look cheap.
    """
    most_layers = max(row.layers for row in rows)
    return [row for row in rows if row.layers == most_layers]


def _with_fewest_params(rows: Sequence[SweepRow], original: SweepRow) -> list[SweepRow]:
    """Keep the rows with at most the original's parameters; if all have more, the fewest."""
    fewest_params = min(map(_params, rows))
    max_params = max(fewest_params, _params(original))
    return [row for row in rows if _params(row) <= max_params]


def _largest_window(rows: Sequence[SweepRow]) -> SweepRow:
    """Return the row with the largest window, and of several the one with the most elements.

    Rows with windows above MAX_WINDOW are used only if there are no others.
    """
    usual = [row for row in rows if max(map(max, row.dilated_sizes)) <= MAX_WINDOW]
    return max(usual or rows, key=lambda row: (_macs(row), row.elements or 0))


def _macs(row: SweepRow) -> int:
    assert row.macs is not None
    return row.macs


def _params(row: SweepRow) -> int:
    assert row.params is not None
    return row.params
