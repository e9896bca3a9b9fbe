"""Counts with the least summed error: the exact one, within the limit, and no worse than any that was considered."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcls_convert.fitting import allocation
from dcls_convert.fitting.allocation import Share, allocate, least_error


def errors(most):
    return st.lists(st.floats(0, 1), min_size=1, max_size=most).map(lambda found: dict(enumerate(found, start=1)))


GROUPS = st.lists(st.tuples(st.integers(1, 12), errors(5)), min_size=1, max_size=4)


def spent(costs, counts):
    return sum(cost * count for cost, count in zip(costs, counts, strict=True))


@given(GROUPS, st.integers(0, 60))
@settings(deadline=None)
def test_no_other_counts_within_the_limit_have_a_smaller_sum(groups, more):
    costs, known = zip(*groups, strict=True)
    limit = sum(costs) + more
    found = allocate(costs, known, limit)
    total = sum(error[count] for error, count in zip(known, found, strict=True))
    possible = [counts for counts in itertools.product(*known) if spent(costs, counts) <= limit]
    assert tuple(found) in possible
    assert total == pytest.approx(
        min(sum(error[count] for error, count in zip(known, counts, strict=True)) for counts in possible), abs=1e-12
    )


def test_a_limit_without_room_for_an_element_each_is_refused():
    with pytest.raises(ValueError, match="admits no element"):
        allocate([5, 7], [{1: 0.0}, {1: 0.0}], 11)


def test_coarse_units_keep_the_limit(monkeypatch):
    monkeypatch.setattr(allocation, "MOST_UNITS", 50)
    costs = [97, 61, 13]
    known = [{count: 1 / count for count in range(1, 30)}] * 3
    found = allocate(costs, known, 1000)
    assert 900 < spent(costs, found) <= 1000


@given(GROUPS, st.data())
@settings(deadline=None)
def test_no_counts_that_were_tried_are_better(groups, data):
    """Though most errors are taken for linear between the measured ones, and here they jump."""
    tried = [data.draw(st.sampled_from(sorted(known))) for _, known in groups]
    costs = [cost for cost, _ in groups]
    limit = spent(costs, tried)
    shares = [
        Share(cost=cost, most=max(known) + 7, tried={count}, error=lambda count, known=known: known.get(count, 0.3))
        for (cost, known), count in zip(groups, tried, strict=True)
    ]
    found = least_error(shares, limit)
    assert spent(costs, found) <= limit
    total = sum(share.error(count) for share, count in zip(shares, found, strict=True))
    assert total <= sum(share.error(count) for share, count in zip(shares, tried, strict=True)) + 1e-12
