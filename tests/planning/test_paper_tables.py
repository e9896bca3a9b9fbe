"""Parameters and MACs of the paper's tables (arXiv:2112.03740), to the digits printed there, without any weights."""

from dataclasses import replace

import pytest

from dcls_convert import plan_conversion, predict_report

from .nets import convs_of

COCO = (3, 1280, 800)  # caption of the COCO table
ADE20K = (3, 2048, 512)  # caption of the ADE20K table
slow = pytest.mark.slow


def report_of(name, size=17, *image, folded=False, **options):
    return predict_report(replace(plan_conversion(convs_of(name, *image), dilated_size=size, **options), folded=folded))


def printed(params, macs, digits=1):
    """In millions and in billions."""
    return f"{params / 1e6:.{digits}f}", f"{macs / 1e9:.{digits}f}"


@pytest.mark.parametrize(("count", "solved", "cost"), [("auto", 5, ("24.0", "12.3")), (6, 6, ("26.0", "12.3"))])
def test_table_1_resnet50_dcls(count, solved, cost):
    report = report_of("resnet50", 7, kernel_count=count)
    assert {layer.kernel_count for layer in report.layers} == {solved}
    assert printed(report.params.before, report.macs.before) == ("25.6", "4.1")
    assert printed(report.params.after, report.macs.after) == cost


@pytest.mark.parametrize(
    ("name", "count", "params", "robust_params", "macs_before", "macs_after"),
    [
        ("convnext_tiny", 34, "29", "28.6", "4.5", "5.0"),
        pytest.param("convnext_small", 40, "50", "50.2", "8.7", "9.5", marks=slow),
        ("convnext_base", 40, "89", "88.6", "15.4", "16.5"),
    ],
)
def test_tables_2_and_5_convnext_dcls(name, count, params, robust_params, macs_before, macs_after):
    report = report_of(name)
    assert {layer.kernel_count for layer in report.layers} == {count}
    assert printed(report.params.before, report.macs.before) == (robust_params, macs_before)
    assert printed(report.params.after, report.macs.after) == (robust_params, macs_after)
    assert {f"{when / 1e6:.0f}" for when in (report.params.before, report.params.after)} == {params}
    assert report.params.after <= report.params.before


@pytest.mark.parametrize(
    ("name", "size", "digits", "cost"), [("resnet50", 7, 1, ("75.9", "12.3")), ("convnext_tiny", 17, 0, ("30", "5"))]
)
def test_tables_1_and_2_with_dense_kernels(name, size, digits, cost):
    report = report_of(name, size, folded=True)
    assert printed(report.params.after, report.macs.after, digits) == cost


# The tables give the MACs of backbone and head together; the heads are the same before and after, so the differences
# are those of the backbones.
@pytest.mark.parametrize(
    ("name", "image", "difference"),
    [
        ("convnext_tiny", ADE20K, 950 - 939),
        pytest.param("convnext_tiny", COCO, 751 - 741, marks=slow),
        pytest.param("convnext_base", ADE20K, 1193 - 1170, marks=slow),
        pytest.param("convnext_base", COCO, 987 - 964, marks=slow),
    ],
)
def test_tables_3_and_4_downstream_backbones(name, image, difference):
    # Each difference is one of two rounded numbers.
    assert report_of(name, 17, image).macs.delta / 1e9 == pytest.approx(difference, abs=1)
