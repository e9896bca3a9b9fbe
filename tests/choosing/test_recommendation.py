"""Which rows are dominated, and which row is recommended."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.choosing.recommendation import recommend
from dcls_convert.choosing.results import (
    Combination,
    SweepRow,
    Timing,
    dominates,
    mark_dominated,
    objectives,
    percent_increase,
)

few = st.integers(1, 4)
maybe = st.none() | few
ORIGINAL = SweepRow(asked=None, status="original", folded_bytes=2, params=2, macs=2)


def windows_of(size):
    """Return the windows of a row of this size, which is the same in all its layers."""
    return ((size, size) if isinstance(size, int) else size,)


def timing(ms):
    return None if ms is None else Timing(median=ms, first_quartile=ms, third_quartile=ms, runs=1)


@st.composite
def sweep_rows(draw):
    """Draw the original and some rows. Some rows have failed, and some lack values."""
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
        rows += [replace(last, step_ms=None, kernel_error=None) for last in rows[-1:]]
    original = replace(
        ORIGINAL,
        macs=2 if "macs" in known else None,
        step_ms=timing(2 if "time" in known else None),
    )
    return [original, *rows]


@given(sweep_rows())
def test_a_row_is_marked_if_and_only_if_an_unmarked_row_dominates_it(rows):
    marked = mark_dominated(rows)
    assert [replace(row, dominated=False) for row in marked] == rows
    done = [row for row in marked if row.status == "done"]
    assert all(row in done for row in marked if row.dominated)
    values_of_rows = objectives(done).values
    front = []
    for values, row in zip(values_of_rows, done, strict=True):
        if not row.dominated:
            front.append(values)
    assert bool(front) == bool(done)
    for values, row in zip(values_of_rows, done, strict=True):
        assert any(dominates(other, values) for other in front) == row.dominated


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
        # Measured times are compared instead of MACs.
        (row(9, macs=3, step_ms=timing(1)), row(9, step_ms=timing(2))),
        # Errors are compared instead of elements.
        (row(9, elements=1, kernel_error=0.1), row(9, kernel_error=0.2)),
        (
            row(9, kernel_error=0.3, images=2, output_error=0.1),
            row(9, kernel_error=0.2, images=2, output_error=0.2),
        ),
    ],
)
def test_a_better_row_dominates_a_worse_one(better, worse):
    marked = mark_dominated([ORIGINAL, better, worse])
    assert [row.dominated for row in marked] == [False, False, True]


@pytest.mark.parametrize(
    ("known", "names"),
    [
        ({}, ("MACs", "number of elements")),
        ({"forward_ms": timing(1)}, ("times", "number of elements")),
        ({"kernel_error": 0.1}, ("MACs", "error of kernels")),
        # Outputs could not be compared.
        ({"kernel_error": 0.1, "images": 2}, ("MACs", "number of elements")),
        ({"output_error": 0.1, "images": 2}, ("MACs", "error of outputs")),
    ],
)
def test_what_rows_are_compared_by_is_named(known, names):
    assert objectives([row(9, **known)]).names == ("window", "parameters", *names)


def test_a_window_does_not_dominate_one_that_it_does_not_contain():
    marked = mark_dominated([ORIGINAL, row((9, 7)), row((7, 9))])
    assert not any(row.dominated for row in marked)


def test_windows_are_compared_in_small_and_large_kernels():
    """With growth, kernels of 3 and 5 get windows of 7 and 9. With a size of 9, both get 9."""
    grown = row("+4", windows=((7, 7), (9, 9)), macs=2)
    same = row(9, macs=3)
    less = row("+2", windows=((5, 5), (7, 7)), macs=3)
    marked = mark_dominated([ORIGINAL, grown, same, less])
    assert [row.dominated for row in marked] == [False, False, False, True]
    assert (grown.window, same.window) == ("+4 (7x7..9x9)", "9x9")


@given(sweep_rows(), st.floats(0, 300), st.floats(0, 300))
def test_the_recommended_row_satisfies_its_reason(rows, slower, more):
    choice = recommend(rows, slower)
    done = [row for row in rows if row.status == "done"]
    is_timed = all(row.step_ms for row in [rows[0], *done])

    def cost(row):
        return row.step_ms.median if is_timed else row.macs

    errors = [row.kernel_error for row in done if row.kernel_error is not None]
    has_errors = len(errors) == len(done)
    if choice.row is None:
        nothing_gained = has_errors and max(errors, default=0) - min(errors, default=0) <= 0.005
        assert not done or cost(rows[0]) is None or nothing_gained
        return
    recommended = rows[choice.row]
    assert recommended.status == "done"
    grown = [row for row in done if row.folded_bytes > 2] or done
    fewest_params = min(row.params for row in grown)
    within_params = [row for row in grown if row.params <= max(2, fewest_params)]
    assert recommended in within_params
    affordable = [
        row for row in within_params if percent_increase(cost(row), cost(rows[0])) <= slower
    ]
    is_cheapest = cost(recommended) == min(map(cost, within_params))
    assert recommended in affordable or (not affordable and is_cheapest)
    assert ("none has at most" in choice.why) == (not affordable)
    if affordable and has_errors:
        assert recommended.kernel_error <= min(row.kernel_error for row in affordable) + 0.005
    elif affordable:
        assert not any(is_larger(row, recommended) for row in affordable)
        # A higher limit does not give a smaller window.
        assert not is_larger(recommended, rows[recommend(rows, max(slower, more)).row])


def is_larger(first, second):
    """True if the window of the first row contains that of the second, and is not equal to it."""
    (window,) = windows_of(first.asked.size)
    (other_window,) = windows_of(second.asked.size)
    if window == other_window:
        return False
    return all(side >= other for side, other in zip(window, other_window, strict=True))


def test_a_recommendation_explains_its_reason():
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
    candidates = "of windows larger than the old kernels with no more parameters than the original"
    assert (
        recommend(rows, 1).why
        == f"it costs the least (+5.0 %) {candidates}; none has at most 1 % more MACs"
    )
    same = [rows[0], row(7, macs=100, folded_bytes=2), *rows[2:]]
    assert recommend(same, 12).row == 2, "the window must be larger than the old kernel"
    assert recommend(rows[:1], 12).why == "no row is done"


def test_a_size_that_does_not_fit_some_layers_is_not_recommended_for_being_cheap():
    some_layers = row(9, macs=2, layers=1)
    all_layers = row(7, macs=2, layers=2)
    assert recommend([ORIGINAL, some_layers, all_layers], 15).row == 2
    assert recommend([ORIGINAL, some_layers], 15).row == 1


def test_no_size_is_recommended_if_all_errors_of_a_trained_network_are_equal():
    def with_errors(*errors):
        rows = [row(size, kernel_error=error) for size, error in zip((7, 9), errors, strict=True)]
        return recommend([ORIGINAL, *rows], 15)

    assert with_errors(0.2, 0.1).row == 2
    equal = with_errors(0.102, 0.1)
    assert (equal.row, equal.command) == (None, None)
    assert equal.why.startswith("without training, no row gains anything")
