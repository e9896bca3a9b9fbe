"""Counts with the least summed error: the exact one, within the limit, and no worse than any that
was considered.
"""

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert import DclsConvertError, convert_, find_convs, plan_conversion
from dcls_convert.fitting import allocation
from dcls_convert.fitting.allocation import GroupErrors, counts_of_min_error, solve_knapsack
from dcls_convert.fitting.counts import sample_channels
from dcls_convert.fitting.fit_settings import CountSettings
from dcls_convert.planning.rule_files import parse_rules

from ..conftest import many_examples
from .networks import SMALL, error_of, network, smooth_noise


def errors(most):
    return st.lists(st.floats(0, 1), min_size=1, max_size=most).map(
        lambda values: dict(enumerate(values, start=1))
    )


GROUPS = st.lists(st.tuples(st.integers(1, 12), errors(5)), min_size=1, max_size=4)


def spent(costs, counts):
    return sum(cost * count for cost, count in zip(costs, counts, strict=True))


@many_examples
@given(GROUPS, st.integers(0, 60))
def test_no_other_counts_within_the_limit_have_a_smaller_sum(groups, more):
    costs, known = zip(*groups, strict=True)
    limit = sum(costs) + more
    chosen = solve_knapsack(costs, known, limit)
    total = sum(error[count] for error, count in zip(known, chosen, strict=True))
    possible = [counts for counts in itertools.product(*known) if spent(costs, counts) <= limit]
    assert tuple(chosen) in possible
    assert total == pytest.approx(
        min(
            sum(error[count] for error, count in zip(known, counts, strict=True))
            for counts in possible
        ),
        abs=1e-12,
    )


def test_coarse_units_keep_the_limit(monkeypatch):
    monkeypatch.setattr(allocation, "SETTINGS", CountSettings(max_units=50))
    costs = [97, 61, 13]
    known = [{count: 1 / count for count in range(1, 30)}] * 3
    chosen = solve_knapsack(costs, known, 1000)
    assert 900 < spent(costs, chosen) <= 1000


@many_examples
@given(GROUPS, st.data())
def test_no_counts_that_were_tried_are_better(groups, data):
    """Although most errors are interpolated between the measured ones, and here they jump."""
    tried = [data.draw(st.sampled_from(sorted(known))) for _, known in groups]
    costs = [cost for cost, _ in groups]
    limit = spent(costs, tried)
    group_errors = [
        GroupErrors(
            cost=cost,
            max_count=max(known) + 35,
            always_measured={count},
            error=lambda count, known=known: known.get(count, 0.3),
        )
        for (cost, known), count in zip(groups, tried, strict=True)
    ]
    chosen = counts_of_min_error(group_errors, limit)
    assert spent(costs, chosen) <= limit
    total = sum(group.error(count) for group, count in zip(group_errors, chosen, strict=True))
    assert (
        total
        <= sum(group.error(count) for group, count in zip(group_errors, tried, strict=True)) + 1e-12
    )


# In a model.


def two_stages():
    """Kernels of two sizes, and some that few elements hold."""
    torch.manual_seed(1)
    stages = [
        nn.Sequential(
            *[nn.Conv2d(4, 4, side, padding=side // 2, groups=4, bias=False) for _ in range(2)]
        )
        for side in (3, 5, 5)
    ]
    stages[2][0].weight.data[..., 2:, :] = 0
    return nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 1), stages=nn.Sequential(*stages))).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize(
    ("budget", "tie", "calibrated"),
    [(60, "stage", False), (100, "none", False), (60, "none", True)],
)
def test_scope_error_has_the_least_summed_error_within_the_budget(budget, tie, calibrated):
    """With images, the error of the outputs."""
    summed = {}
    images = smooth_noise(16)
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


RULES = """
format: 1
rules:
  - {name: stated, match: {path: "stages.1.*"}, kernel_count: 3}
  - {name: free, match: {kernel_size: {min: 3}}}
"""
ALL_STATED = parse_rules(
    "format: 1\nrules:\n  - {match: {kernel_size: {min: 3}}, kernel_count: 3}\n"
)


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("tie", ["stage", "none"])
def test_counts_that_rules_state_stay_and_the_rest_of_the_budget_is_allocated(tie):
    reports = [
        convert_(
            two_stages(),
            dilated_size=9,
            input_size=SMALL,
            rules=parse_rules(RULES),
            tie=tie,
            scope=scope,
        )
        for scope in ("model", "error")
    ]
    for report in reports:
        assert {layer.kernel_count for layer in report.layers if "s.1." in layer.name} == {3}
        assert report.budget.used <= report.budget.limit
    assert len({layer.kernel_count for layer in reports[1].layers}) > 2


@pytest.mark.usefixtures("quick_fit")
@pytest.mark.parametrize("options", [{"kernel_count": 4}, {"rules": ALL_STATED}], ids=str)
def test_where_there_is_nothing_to_measure_images_change_no_count(options):
    reports = [
        convert_(two_stages(), dilated_size=9, input_size=SMALL, calibration=images, **options)
        for images in (None, [smooth_noise()])
    ]
    one, other = ([layer.kernel_count for layer in report.layers] for report in reports)
    assert one == other


@pytest.mark.usefixtures("quick_fit")
def test_a_budget_that_one_count_can_keep_is_kept_though_no_layer_alone_could():
    """A 3x3 stage alone has no room for an element of 30 %."""
    options = {"dilated_size": 9, "input_size": SMALL, "budget": 22, "tie": "none"}
    with pytest.raises(DclsConvertError, match="the smallest sufficient budget"):
        convert_(two_stages(), scope="layer", **options)
    report = convert_(two_stages(), scope="error", **options)
    assert report.budget.used <= report.budget.limit
    least = convert_(two_stages(), scope="model", **options)
    assert {layer.kernel_count for layer in least.layers} == {1}


@pytest.mark.usefixtures("quick_fit")
def test_the_scope_is_error_with_images_and_else_the_papers():
    options = {"dilated_size": 9, "input_size": SMALL, "budget": 60}
    plain = convert_(two_stages(), **options)
    images = [smooth_noise()]
    assert (plain.budget.scope, plain.plan.scope) == ("model", "model")
    counts = [
        {
            layer.name: layer.kernel_count
            for layer in convert_(two_stages(), calibration=images, **more).layers
        }
        for more in (options, options | {"scope": "error"}, options | {"scope": "model"})
    ]
    assert counts[0] == counts[1] != counts[2]
    assert convert_(two_stages(), calibration=images, **options).budget.scope == "error"


@many_examples
@given(st.data())
def test_some_lines_go_with_the_roots_of_their_input_channels(data):
    groups, inputs, outputs = (data.draw(st.integers(1, 40)) for _ in range(3))
    channels = torch.arange(groups * inputs)
    lines = channels.reshape(groups, 1, inputs, 1).expand(-1, outputs, -1, -1)
    kernels = lines.flatten(0, 1)  # (O, I, 1)
    (some,), roots = sample_channels([kernels], channels.reshape(-1, 1, 1), groups)
    left = groups * inputs * outputs
    max_pairs = CountSettings().max_channel_pairs
    assert min(left, max_pairs) <= some[..., 0].numel() < max(left + 1, 4 * max_pairs)
    per_group = some.shape[1]
    seen = roots.reshape(-1, 1, per_group).expand(-1, len(some) // (len(roots) // per_group), -1)
    assert torch.equal(seen.reshape(some[..., 0].shape), some[..., 0])


def test_scope_error_needs_kernels_to_fit():
    model = network()
    with pytest.raises(DclsConvertError, match="convert_"):
        plan_conversion(find_convs(model, SMALL), dilated_size=9, scope="error")
    with pytest.raises(DclsConvertError, match="is for init='fit'"):
        convert_(model, dilated_size=9, scope="error", init="random", input_size=SMALL)
    with torch.device("meta"):
        meta_model = network()
    with pytest.raises(DclsConvertError, match="meta"):
        convert_(meta_model, dilated_size=9, scope="error", input_size=SMALL)
