"""Counts with the least summed error: the exact one, within the limit, and no worse than any that was considered."""

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert import DclsConvertError, convert_, find_convs, plan_conversion
from dcls_convert.fitting import counts as module
from dcls_convert.fitting.counts import Share, allocate, least_error

from .test_calibrate import SMALL, error_of, network, photos


def errors(most):
    return st.lists(st.floats(0, 1), min_size=1, max_size=most).map(lambda values: dict(enumerate(values, start=1)))


GROUPS = st.lists(st.tuples(st.integers(1, 12), errors(5)), min_size=1, max_size=4)


def spent(costs, counts):
    return sum(cost * count for cost, count in zip(costs, counts, strict=True))


@given(GROUPS, st.integers(0, 60))
def test_no_other_counts_within_the_limit_have_a_smaller_sum(groups, more):
    costs, known = zip(*groups, strict=True)
    limit = sum(costs) + more
    chosen = allocate(costs, known, limit)
    total = sum(error[count] for error, count in zip(known, chosen, strict=True))
    possible = [counts for counts in itertools.product(*known) if spent(costs, counts) <= limit]
    assert tuple(chosen) in possible
    assert total == pytest.approx(
        min(sum(error[count] for error, count in zip(known, counts, strict=True)) for counts in possible), abs=1e-12
    )


def test_coarse_units_keep_the_limit(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNITS", 50)
    costs = [97, 61, 13]
    known = [{count: 1 / count for count in range(1, 30)}] * 3
    chosen = allocate(costs, known, 1000)
    assert 900 < spent(costs, chosen) <= 1000


@given(GROUPS, st.data())
def test_no_counts_that_were_tried_are_better(groups, data):
    """Though most errors are taken for linear between the measured ones, and here they jump."""
    tried = [data.draw(st.sampled_from(sorted(known))) for _, known in groups]
    costs = [cost for cost, _ in groups]
    limit = spent(costs, tried)
    shares = [
        Share(cost=cost, most=max(known) + 7, tried={count}, error=lambda count, known=known: known.get(count, 0.3))
        for (cost, known), count in zip(groups, tried, strict=True)
    ]
    chosen = least_error(shares, limit)
    assert spent(costs, chosen) <= limit
    total = sum(share.error(count) for share, count in zip(shares, chosen, strict=True))
    assert total <= sum(share.error(count) for share, count in zip(shares, tried, strict=True)) + 1e-12


def test_a_count_that_was_tried_is_considered_between_those_that_are_measured_first():
    share = Share(cost=1, most=40, tried={7}, error=lambda count: 0.0 if count == 7 else 0.3)
    assert least_error([share], 40) == [7]


# In a model.


def two_stages():
    """Kernels of two sizes, and some that few elements hold."""
    torch.manual_seed(1)
    stages = [
        nn.Sequential(*[nn.Conv2d(4, 4, side, padding=side // 2, groups=4, bias=False) for _ in range(2)])
        for side in (3, 5, 5)
    ]
    stages[2][0].weight.data[..., 2:, :] = 0
    return nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 1), stages=nn.Sequential(*stages))).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("budget", "tie", "calibrated"), [(60, "stage", False), (100, "none", False), (60, "none", True)]
)
def test_scope_error_has_the_least_summed_error_within_the_budget(budget, tie, calibrated):
    """With images, the error of the outputs."""
    summed, images = {}, photos(16)
    for scope in ("model", "stage", "layer", "error"):
        model = two_stages()
        with torch.no_grad():
            before = model(images)
        options = {"scope": scope, "tie": tie, "calibration": [images] if calibrated else None}
        report = convert_(model, dilated_size=9, budget=budget, input_size=SMALL, **options)
        assert report.budget.used <= report.budget.limit
        assert all(layer.tie_group is None or tie == "stage" for layer in report.layers)
        errors = [layer.fit_error for layer in report.layers]
        summed[scope] = error_of(model, before, images) if calibrated else sum(errors)
    assert summed["error"] <= min(summed.values()) * (1 + 1e-5)
    assert tie == "stage" or summed["error"] < 0.9 * summed["model"]


def test_scope_error_needs_kernels_to_fit():
    model = network()
    with pytest.raises(DclsConvertError, match="convert_"):
        plan_conversion(find_convs(model, SMALL), dilated_size=9, scope="error")
    with pytest.raises(DclsConvertError, match="fitted"):
        convert_(model, dilated_size=9, scope="error", init="random", input_size=SMALL)
    with torch.device("meta"):
        meta_model = network()
    with pytest.raises(DclsConvertError, match="meta"):
        convert_(meta_model, dilated_size=9, scope="error", input_size=SMALL)
