"""The solved count is within the budget, and one more is not."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.errors import PlanError
from dcls_convert.options import parse_percent
from dcls_convert.planning.kernel_counts import check_counts, solve_counts

from ..conftest import many_examples
from ..rules import rules_of
from .nets import Net, plan_of

HUNDREDTH_OF_A_PERCENT = Fraction(1, 10_000)


# An oracle, which counts parameters one element at a time instead of by a formula.


def parameters(layers, counts):
    """Weights of every layer, and the coordinates of every tie group once."""
    weights = sum(layer.lines for layer in layers for _ in range(counts[layer.name]))
    owners = {layer.tie_group or layer.name: layer for layer in layers}
    return weights + sum(
        owner.lines * owner.coordinates_per_element
        for owner in owners.values()
        for _ in range(counts[owner.name])
    )


def largest_count(layers, limit):
    """Find the largest count for the layers that have none, by trial."""
    cells = [layer.cells for layer in layers if not layer.kernel_count]
    return max(
        count
        for count in range(min(cells) + 1)
        if count == 0
        or parameters(layers, {layer.name: layer.kernel_count or count for layer in layers})
        <= limit
    )


BASE = plan_of(Net()).layers[0]


def draft(name="a", **changes):
    """A layer without a count: 4 lines of 9 weights, 49 cells, 2 coordinates for each element."""
    return replace(BASE, names=(name,), tie_group=None, kernel_count=0, **changes)


@st.composite
def drafts(draw):
    """Layers of up to three stages, tied and untied.

    The layers of a group have one shape, and one stated count or none.
    """
    layers = []
    for index in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 4))
        dims = draw(st.integers(1, 3))
        cells = draw(st.integers(1, 25))
        tied = size > 1 and draw(st.booleans())
        group = {
            "stage": draw(st.sampled_from("abc")),
            "out_channels": draw(st.integers(1, 9)),
            "groups": BASE.in_channels,
            "kernel_size": (draw(st.integers(1, 12)),) + (1,) * (dims - 1),
            "dilated_size": (cells,) + (1,) * (dims - 1),
            "interpolation": draw(st.sampled_from(["bilinear", "gaussian"])),
        }
        count = draw(st.just(0) | st.integers(1, cells))
        for member in range(size):
            layer = draft(f"layer{index}.{member}", **group)
            layers.append(
                replace(layer, tie_group=f"group{index}" if tied else None, kernel_count=count)
            )
    return draw(st.permutations(layers))


# Of integers alone, hypothesis tries small ones: too small a budget for an element.
percentages = st.sampled_from(["40", "100", "180.25", "300"]) | st.integers(1, 30_000).map(
    lambda hundredths: f"{hundredths / 100:.2f}"
)


@many_examples
@given(layers=drafts(), percent=percentages)
def test_the_count_is_the_largest_within_the_budget(layers, percent):
    share = parse_percent(percent)
    limit = math.floor(share * sum(layer.dense_weights for layer in layers))
    free = [layer for layer in layers if not layer.kernel_count]
    count = largest_count(layers, limit) if free else None
    if count == 0:
        with pytest.raises(PlanError, match="no room for even one element"):
            check_counts(layers, share)
        return
    check_counts(layers, share)
    solved, budget = solve_counts(layers, share)
    assert [layer.name for layer in solved] == [layer.name for layer in layers]
    counts = {layer.name: layer.kernel_count for layer in solved}
    assert counts == {layer.name: layer.kernel_count or count for layer in layers}
    assert budget.limit == limit
    assert budget.used == parameters(layers, counts)
    if free == layers:
        assert budget.exact_count * parameters(layers, dict.fromkeys(counts, 1)) == limit
    shown = set(counts.values())
    assert {budget.kernel_count} == (shown if len(shown) == 1 else {None})


@many_examples
@given(layers=drafts(), hundredths=st.integers(1, 300))
def test_the_smallest_budget_that_an_error_names_suffices_and_less_does_not(layers, hundredths):
    share = hundredths * HUNDREDTH_OF_A_PERCENT
    try:
        check_counts(layers, share)
    except PlanError as error:
        named = parse_percent(
            re.search(r"the smallest sufficient budget is (\S+) %", str(error))[1]
        )
        assert named > share
        assert min(layer.kernel_count for layer in solve_counts(layers, named)[0]) >= 1
        with pytest.raises(PlanError, match="no room for even one element"):
            check_counts(layers, named - HUNDREDTH_OF_A_PERCENT)


def test_an_exact_count_applies_to_rules_that_leave_the_count_open():
    rules = rules_of({"match": {"kind": "depthwise"}, "kernel_count": "auto"})
    plan = plan_of(Net(), kernel_count="exact", rules=rules)
    for layer in plan.layers:
        assert layer.kernel_count == math.prod(layer.kernel_size)
