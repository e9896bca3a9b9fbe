"""The report as data: a plan predicts what is measured on the converted model."""

import math
from dataclasses import replace

import pytest
from torch import nn

from dcls_convert import apply_plan_, find_convs, plan_conversion, predict_report

from ..planning.nets import IMAGE, Net, Shared, depthwise, on_meta
from .measured import measure_report
from .predicted import predicted_report


def test_a_number_that_is_not_finite_is_never_written():
    report = predicted_report("test_convnext")
    layer = replace(report.layers[0], fit_error=math.nan)
    report = predict_report(replace(report.plan, layers=(layer,)))
    with pytest.raises(ValueError, match="JSON"):
        report.to_json()


MODELS = {
    "shared": (Shared, IMAGE),
    "without bias": (
        lambda: Net(lambda: [depthwise(bias=False), nn.Conv2d(4, 4, 3, padding=1)]),
        IMAGE,
    ),
    "1-D": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Conv1d(4, 4, 5, padding=2, groups=4)
        ),
        (4, 126),
    ),
    "3-D": (
        lambda: nn.Sequential(nn.Conv3d(4, 8, (1, 3, 3), groups=4, padding=1, stride=(1, 2, 1))),
        (4, 5, 9, 7),
    ),
}


@pytest.mark.parametrize("interpolation", ["bilinear", "gaussian"])
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_report_equals_that_of_the_converted_model(name, interpolation):
    build, size = MODELS[name]
    model = on_meta(build)
    plan = plan_conversion(find_convs(model, size), dilated_size=9, interpolation=interpolation)
    predicted = predict_report(plan)
    apply_plan_(model, plan)
    assert predicted.to_dict() == measure_report(model, plan)
    for unit in ("params", "macs"):
        untouched = getattr(predicted, f"{unit}_untouched")
        assert untouched >= 0
        for when in ("before", "after"):
            replaced = sum(getattr(layer, f"{unit}_{when}") for layer in predicted.layers)
            assert replaced + untouched == getattr(getattr(predicted, unit), when)
    assert predicted.budget.used <= predicted.budget.limit
