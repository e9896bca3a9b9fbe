"""Parameters and MACs of the paper's tables (arXiv:2112.03740), to the digits printed there, without any weights."""

import pytest
import timm

from dcls_convert import find_convs, fold_to_dense_, plan_conversion, predict_report
from dcls_convert.networks.tracing import trace
from dcls_convert.surgery.start import apply_plan_

from .nets import convs_of, on_meta

IMAGE = (3, 224, 224)
COCO = (3, 1280, 800)  # caption of the COCO table
ADE20K = (3, 2048, 512)  # caption of the ADE20K table


def millions(params: int, digits: int) -> str:
    return f"{params / 1e6:.{digits}f}"


def giga(macs: int, digits: int) -> str:
    return f"{macs / 1e9:.{digits}f}"


@pytest.mark.parametrize(
    ("count", "expected_count", "params", "macs"),
    [("auto", 5, "24.0", "12.3"), (6, 6, "26.0", "12.3")],
)
def test_table_1_resnet50_dcls(count, expected_count, params, macs):
    report = predict_report(plan_conversion(convs_of("resnet50", IMAGE), kernel_count=count, dilated_size=7))
    assert {layer.kernel_count for layer in report.layers} == {expected_count}
    assert (millions(report.params.before, 1), giga(report.macs.before, 1)) == ("25.6", "4.1")
    assert (millions(report.params.after, 1), giga(report.macs.after, 1)) == (params, macs)


@pytest.mark.parametrize(
    ("name", "count", "params", "robust_params", "macs_before", "macs_after"),
    [
        ("convnext_tiny", 34, "29", "28.6", "4.5", "5.0"),
        ("convnext_small", 40, "50", "50.2", "8.7", "9.5"),
        ("convnext_base", 40, "89", "88.6", "15.4", "16.5"),
    ],
)
def test_tables_2_and_5_convnext_dcls(name, count, params, robust_params, macs_before, macs_after):
    report = predict_report(plan_conversion(convs_of(name, IMAGE), dilated_size=17))
    assert {layer.kernel_count for layer in report.layers} == {count}
    for when in (report.params.before, report.params.after):
        assert (millions(when, 0), millions(when, 1)) == (params, robust_params)
    assert (giga(report.macs.before, 1), giga(report.macs.after, 1)) == (macs_before, macs_after)
    assert report.params.after <= report.params.before


@pytest.mark.parametrize(
    ("name", "size", "digits", "cost"), [("resnet50", 7, 1, ("75.9", "12.3")), ("convnext_tiny", 17, 0, ("30", "5"))]
)
def test_tables_1_and_2_with_dense_kernels(name, size, digits, cost):
    model = on_meta(timm.create_model, name)
    apply_plan_(model, plan_conversion(find_convs(model, IMAGE), dilated_size=size))
    fold_to_dense_(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert (millions(params, digits), giga(trace(model, IMAGE).macs, digits)) == cost


# The tables give the MACs of backbone and head together; the heads are the same before and after, so the differences
# are those of the backbones.
@pytest.mark.parametrize(
    ("name", "input_size", "difference"),
    [
        ("convnext_tiny", ADE20K, 950 - 939),
        ("convnext_tiny", COCO, 751 - 741),
        pytest.param("convnext_small", ADE20K, 1045 - 1027, marks=pytest.mark.slow),
        pytest.param("convnext_base", ADE20K, 1193 - 1170, marks=pytest.mark.slow),
        pytest.param("convnext_small", COCO, 844 - 827, marks=pytest.mark.slow),
        pytest.param("convnext_base", COCO, 987 - 964, marks=pytest.mark.slow),
    ],
)
def test_tables_3_and_4_downstream_backbones(name, input_size, difference):
    report = predict_report(plan_conversion(convs_of(name, input_size), dilated_size=17))
    # Each difference is one of two rounded numbers.
    assert report.macs.delta / 1e9 == pytest.approx(difference, abs=1)


def test_exact_numbers_of_convnext_tiny():
    report = predict_report(plan_conversion(convs_of("convnext_tiny", IMAGE), dilated_size=17))
    assert (report.params.before, report.params.after) == (28_589_128, 28_587_688)
    assert report.macs.before == 4_455_531_264
    assert (report.budget.limit, report.budget.used, report.budget.exact_count) == (324_576, 323_136, 34.15)
