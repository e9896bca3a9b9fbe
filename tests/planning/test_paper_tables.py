"""Plans reproduce the parameters and MACs of the paper's tables (arXiv:2112.03740), to the digits
printed there.
"""

from dataclasses import replace

import pytest

from dcls_convert import plan_conversion, predict_report

from .nets import convs_of

slow = pytest.mark.slow


def report_of(name, size, *, folded=False, **options):
    plan = plan_conversion(convs_of(name), dilated_size=size, **options)
    return predict_report(replace(plan, folded=folded))


def printed(cost):
    """Parameters in millions and MACs in billions."""
    params, macs = cost
    return f"{params / 1e6:.1f}", f"{macs / 1e9:.1f}"


RESNET50 = ("25.6", "4.1")
TINY = ("28.6", "4.5")


@pytest.mark.parametrize(
    ("name", "size", "options", "count", "before", "after"),
    [
        ("resnet50", 7, {}, 5, RESNET50, ("24.0", "12.3")),
        ("resnet50", 7, {"kernel_count": 6}, 6, RESNET50, ("26.0", "12.3")),
        ("resnet50", 7, {"folded": True}, 5, RESNET50, ("75.9", "12.3")),  # with dense kernels
        ("convnext_tiny", 17, {}, 34, TINY, ("28.6", "5.0")),
        # Printed there as 30 and 5.
        ("convnext_tiny", 17, {"folded": True}, 34, TINY, ("30.2", "5.0")),
        pytest.param("convnext_small", 17, {}, 40, ("50.2", "8.7"), ("50.2", "9.5"), marks=slow),
        ("convnext_base", 17, {}, 40, ("88.6", "15.4"), ("88.6", "16.5")),
    ],
)
def test_tables_1_2_and_5(name, size, options, count, before, after):
    report = report_of(name, size, **options)
    assert {layer.kernel_count for layer in report.layers} == {count}
    assert printed((report.params.before, report.macs.before)) == before
    assert printed((report.params.after, report.macs.after)) == after


@pytest.mark.parametrize(
    ("name", "size", "options", "count"),
    [
        ("convnext_tiny", 17, {"tie": "none"}, 16),
        ("convnext_tiny", 17, {"interpolation": "gaussian"}, 26),
        pytest.param("convnext_base", 17, {"interpolation": "gaussian"}, 34, marks=slow),
        ("resnet50", 7, {"tie": "none"}, 3),
    ],
)
def test_counts_without_ties_and_with_sigma(name, size, options, count):
    assert report_of(name, size, **options).budget.kernel_count == count
