"""Which rows others dominate, and which one to take."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.sweeps.recommendation import recommend
from dcls_convert.sweeps.results import (
    Combination,
    SweepRow,
    Timing,
    dominates,
    mark_dominated,
    objectives,
    percent_more,
)

few = st.integers(1, 4)
maybe = st.none() | few
ORIGINAL = SweepRow(asked=None, status="original", folded_bytes=2, params=2, macs=2)


def windows_of(size):
    """The windows that a row of this size has: one in all its layers."""
    return ((size, size) if isinstance(size, int) else size,)


def timing(ms):
    return None if ms is None else Timing(median=ms, first_quartile=ms, third_quartile=ms, runs=1)


@st.composite
def sweep_rows(draw):
    """The original and some rows, of which some failed and some lack what others have."""
    known = draw(st.sets(st.sampled_from(["macs", "time", "error"])))
    row = st.builds(
        lambda size, folded, params, elements, macs, ms, error, failed: SweepRow(
            asked=Combination(size=size),
            dilated_sizes=windows_of(size),
            status="failed" if failed else "done",
            folded_bytes=folded,
            params=params,
            elements=elements,
            macs=macs if "macs" in known else None,
            forward_ms=timing(ms if "time" in known else None),
            step_ms=timing(ms if "time" in known else None),
            kernel_error=error if "error" in known else None,
        ),
        *(
            few | st.tuples(few, few),
            few,
            few,
            few,
            few,
            few,
            st.floats(0, 1),
            st.sampled_from([False, False, True]),
        ),
    )
    rows = draw(st.lists(row, max_size=8))
    if draw(st.booleans()):  # interrupted
        rows += [replace(found, step_ms=None, kernel_error=None) for found in rows[-1:]]
    original = replace(
        ORIGINAL,
        macs=2 if "macs" in known else None,
        step_ms=timing(2 if "time" in known else None),
    )
    return [original, *rows]


@given(sweep_rows())
def test_no_row_that_is_left_is_dominated_and_every_other_one_is_by_one_that_is_left(rows):
    marked = mark_dominated(rows)
    assert [replace(row, dominated=False) for row in marked] == rows
    done = [row for row in marked if row.status == "done"]
    assert all(row in done for row in marked if row.dominated)
    numbers = objectives(done)
    front = [number for number, row in zip(numbers, done, strict=True) if not row.dominated]
    assert bool(front) == bool(done)
    for number, row in zip(numbers, done, strict=True):
        assert any(dominates(other, number) for other in front) == row.dominated


def row(size, windows=(), **known):
    return SweepRow(
        asked=Combination(size=size),
        status="done",
        dilated_sizes=windows_of(size) if not isinstance(size, str) else windows,
        **{"folded_bytes": 3, "params": 2, "elements": 2, "macs": 2} | known,
    )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (row(9), row(7)),
        (row((9, 7)), row(7)),
        (row(9), row((9, 7))),
        (row(9, elements=3), row(9)),
        (row(9), row(9, params=3)),
        (row(9), row(9, macs=3)),
        (
            row(9, macs=3, step_ms=timing(1)),
            row(9, step_ms=timing(2)),
        ),  # measured times count instead
        (row(9, elements=1, kernel_error=0.1), row(9, kernel_error=0.2)),  # so does the error
        (
            row(9, kernel_error=0.3, images=2, output_error=0.1),
            row(9, kernel_error=0.2, images=2, output_error=0.2),
        ),
    ],
)
def test_a_better_row_dominates_a_worse_one(better, worse):
    assert [found.dominated for found in mark_dominated([ORIGINAL, better, worse])] == [
        False,
        False,
        True,
    ]


def test_windows_of_which_neither_holds_the_other_do_not_dominate():
    assert not any(
        found.dominated for found in mark_dominated([ORIGINAL, row((9, 7)), row((7, 9))])
    )


def test_windows_are_compared_in_small_and_large_kernels():
    """Growth gives kernels of 3 and 5 windows of 7 and 9; a size of 9 gives both 9."""
    grown = row("+4", windows=((7, 7), (9, 9)), macs=2)
    same = row(9, macs=3)
    less = row("+2", windows=((5, 5), (7, 7)), macs=3)
    assert [found.dominated for found in mark_dominated([ORIGINAL, grown, same, less])] == [
        False,
        False,
        False,
        True,
    ]
    assert (grown.window, same.window) == ("+4 (7x7..9x9)", "9x9")


@given(sweep_rows(), st.floats(0, 300), st.floats(0, 300))
def test_the_row_to_take_keeps_what_its_reason_says(rows, slower, more):
    choice = recommend(rows, slower)
    done = [found for found in rows if found.status == "done"]
    timed = all(found.step_ms for found in [rows[0], *done])
    cost = (lambda found: found.step_ms.median) if timed else (lambda found: found.macs)
    errors = [found.kernel_error for found in done if found.kernel_error is not None]
    has_errors = len(errors) == len(done)
    if choice.row is None:
        nothing_gained = has_errors and max(errors, default=0) - min(errors, default=0) <= 0.005
        assert not done or cost(rows[0]) is None or nothing_gained
        return
    taken = rows[choice.row]
    assert taken.status == "done"
    wide = [found for found in done if found.folded_bytes > 2] or done
    light = [found for found in wide if found.params <= 2] or [
        found for found in wide if found.params == min(other.params for other in wide)
    ]
    assert taken in light
    within = [found for found in light if percent_more(cost(found), cost(rows[0])) <= slower]
    assert taken in within or (not within and cost(taken) == min(map(cost, light)))
    assert ("none has at most" in choice.why) == (not within)
    if within and all(found.kernel_error is not None for found in done):
        assert taken.kernel_error <= min(found.kernel_error for found in within) + 0.005
    elif within:
        assert not any(larger(found, taken) for found in within)
        # Who may spend more gets no less.
        assert not larger(taken, rows[recommend(rows, max(slower, more)).row])


def larger(one, other):
    one, other = (
        ((found.asked.size,) * 2 if isinstance(found.asked.size, int) else found.asked.size)
        for found in (one, other)
    )
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def test_a_recommendation_states_its_reason():
    rows = [
        replace(ORIGINAL, macs=100),
        row(7, macs=105),
        row(9, macs=120),
        row(9, macs=110, params=3),
    ]
    assert recommend(rows, 12).why == (
        "the largest window with no more parameters than the original "
        "and at most 12 % more MACs (+5.0 %)"
    )
    larger = "of windows larger than the old kernels with no more parameters than the original"
    assert (
        recommend(rows, 1).why
        == f"it costs the least (+5.0 %) {larger}; none has at most 1 % more MACs"
    )
    same = [rows[0], row(7, macs=100, folded_bytes=2), *rows[2:]]
    assert recommend(same, 12).row == 2, "not the window of the old kernel"
    assert recommend(rows[:1], 12).why == "no row is done"


def test_a_size_that_layers_refuse_is_not_taken_because_it_is_cheap():
    refused = row(9, macs=2, layers=1)
    all_layers = row(7, macs=2, layers=2)
    assert recommend([ORIGINAL, refused, all_layers], 15).row == 2
    assert recommend([ORIGINAL, refused], 15).row == 1


def test_no_size_is_recommended_where_no_row_keeps_more_of_a_trained_network():
    def with_errors(*errors):
        rows = [row(size, kernel_error=error) for size, error in zip((7, 9), errors, strict=True)]
        return recommend([ORIGINAL, *rows], 15)

    assert with_errors(0.2, 0.1).row == 2
    equal = with_errors(0.102, 0.1)
    assert (equal.row, equal.command) == (None, None)
    assert equal.why.startswith("without training, no row gains anything")
