"""Which row of a sweep is recommended, and why."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.choosing.recommendation import recommend
from dcls_convert.choosing.rows import Combination, SweepRow, percent_increase
from dcls_convert.options import MAX_WINDOW

few = st.integers(1, 4)
ORIGINAL = SweepRow(asked=None, status="original", params=2, macs=2)


def row(size, windows=None, **known):
    return SweepRow(
        asked=Combination(size=size),
        status="done",
        dilated_sizes=windows or ((size, size),),
        **{"params": 2, "elements": 2, "macs": 2} | known,
    )


@st.composite
def sweep_rows(draw):
    """Draw the original and some rows. Some rows do not fit, and MACs may be unknown."""
    has_macs = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        drawn = row(
            draw(st.sampled_from([3, 5, 17, 19])),
            params=draw(few),
            elements=draw(few),
            macs=draw(few) if has_macs else None,
            layers=draw(st.integers(1, 2)),
        )
        if draw(st.booleans()):
            drawn = replace(drawn, status="does not fit", reason="no")
        rows.append(drawn)
    return [replace(ORIGINAL, macs=2 if has_macs else None), *rows]


@given(sweep_rows(), st.floats(0, 300))
def test_the_recommended_row_satisfies_its_reason(rows, limit):
    choice = recommend(rows, limit, trained=False)
    done = [row for row in rows if row.status == "done"]
    grown = [row for row in done if row.macs is not None and row.macs > 2]
    assert (choice.row is None) == (not grown)
    if choice.row is None:
        return
    recommended = rows[choice.row]
    assert recommended.status == "done"
    most_layers = max(row.layers for row in grown)
    candidates = [row for row in grown if row.layers == most_layers]
    fewest_params = min(row.params for row in candidates)
    candidates = [row for row in candidates if row.params <= max(2, fewest_params)]
    assert recommended in candidates
    affordable = [row for row in candidates if percent_increase(row.macs, 2) <= limit]
    assert ("none has at most" in choice.why) == (not affordable)
    if not affordable:
        least_macs = min(row.macs for row in candidates)
        assert recommended.macs == least_macs
        at_least_macs = [row.elements or 0 for row in candidates if row.macs == least_macs]
        assert (recommended.elements or 0) == max(at_least_macs)
        return
    usual = [row for row in affordable if max(row.dilated_sizes[0]) <= MAX_WINDOW] or affordable
    assert recommended in usual
    assert recommended.macs == max(row.macs for row in usual)


def test_a_recommendation_explains_its_reason():
    rows = [
        replace(ORIGINAL, macs=100),
        row(7, macs=105),
        row(9, macs=120),
        row(9, macs=110, params=3),
    ]
    assert recommend(rows, 12, trained=False).why == (
        "the largest window with no more parameters than the original "
        "and at most 12 % more MACs (+5.0 %)"
    )
    assert recommend(rows, 1, trained=False).why == (
        "it costs the least (+5.0 %) of windows larger than the old kernels with no more "
        "parameters than the original; none has at most 1 % more MACs"
    )
    assert recommend(rows[:1], 12, trained=False).why == "no size fits"


def test_a_window_of_the_old_kernels_size_is_not_recommended():
    rows = [replace(ORIGINAL, macs=100), row(7, macs=100), row(9, macs=120)]
    assert recommend(rows, 12, trained=False).row == 2
    assert recommend(rows[:2], 12, trained=False).why == "no window is larger than the old kernels"


def test_a_size_that_does_not_fit_some_layers_is_not_recommended_for_being_cheap():
    some_layers = row(9, macs=3, layers=1)
    all_layers = row(7, macs=4, layers=2)
    assert recommend([ORIGINAL, some_layers, all_layers], math.inf, trained=False).row == 2
    assert recommend([ORIGINAL, some_layers], math.inf, trained=False).row == 1


@pytest.mark.parametrize("rows", [[ORIGINAL], [ORIGINAL, row(7), row(9, macs=3)]])
def test_no_size_is_recommended_for_a_trained_network(rows):
    choice = recommend(rows, math.inf, trained=True)
    assert (choice.row, choice.command) == (None, None)
    assert choice.why.startswith("without further training, converting a trained network gains")


def test_rows_name_their_windows():
    assert row("+4", windows=((7, 7), (9, 9))).window == "+4 (7x7..9x9)"
    assert row(9).window == "9x9"
    assert ORIGINAL.window == "original"
