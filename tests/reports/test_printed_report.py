"""Views of a report are readable at 80 columns, without colour, and in a pipe."""

import io
import xml.etree.ElementTree
from dataclasses import replace

import pytest
from rich.console import Console
from torch import nn

from dcls_convert import find_convs, plan_conversion, predict_report
from dcls_convert.reports.report import report_markdown, report_view

from .predicted import predicted_report


def printed(report, *, verbose=0):
    recorder = Console(width=80, file=io.StringIO())
    recorder.print(report_view(report, verbose=verbose))
    return recorder.file.getvalue()


@pytest.mark.parametrize("name", ["convnext_tiny", "mixnet_s"])
def test_views_fit_80_columns_and_state_each_number(name):
    report = predicted_report(name)
    short, long, longest = (printed(report, verbose=verbose) for verbose in (0, 1, 2))
    for text in (short, long, longest):
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
        assert f"{report.params.before:,} → {report.params.after:,} parameters" in text
    assert all(layer.stage in short for layer in report.layers)
    assert f"{report.macs.before:,}" in long
    assert f"{report.params.delta:+,}" in long
    assert f"{report.macs.percent:+.2f} %" in long
    assert "MACs rise although parameters do not" in long
    assert all(layer.name in long.replace("\n", "") for layer in report.layers)
    assert all(skip.name in longest.replace("\n", "") for skip in report.skipped)


def test_the_verdict_comes_first_in_fourteen_lines():
    report = predicted_report("convnext_tiny", dilated_size=17)
    lines = printed(report).splitlines()
    assert len(lines) <= 14
    ties = "4 tie groups share 97,920 positions in stages.0, stages.1, stages.2, stages.3"
    assert lines[-3].rstrip() == f" {ties}."
    assert lines[-2].rstrip() == " In 3 of 18 layers, outer cells meet only padding (maps of 7x7)."
    assert f"- {ties}." in report_markdown(report)
    assert str(report) == "\n".join(lines)
    assert f"| {report.params.after:,} |" in report_markdown(report)
    assert " ".join(lines[:2]) == (
        "28,589,128 → 28,587,688 parameters (-0.01 %), 4.46 → 4.97 G MACs (+11.6 %) "
        "34 elements in 17x17: timm:convnext_tiny, input 3x224x224"
    )


def test_the_growth_is_shown_if_kernels_have_several_sizes():
    mixed = printed(predicted_report("mobilenetv3_small_050")).splitlines()
    assert mixed[1].startswith("10 elements in 5x5..7x7 (+2): timm:mobilenetv3_small_050")


@pytest.mark.parametrize(
    ("inputs", "size", "warnings"),
    [
        (97, 5, ["Even the smallest growth adds 15 % to the MACs"]),
        (98, 5, []),
        (70, 7, ["1.5 times the MACs"]),
        (71, 7, []),  # 50 %
    ],
)
def test_windows_that_add_more_macs_than_the_limits_are_warned_of(inputs, size, warnings):
    """The smallest growth may add 15 %, other ones 50 %."""
    model = nn.Sequential(nn.Conv2d(inputs, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4))
    plan = plan_conversion(find_convs(model, (inputs, 8, 8)), dilated_size=size)
    text = printed(predict_report(plan))
    assert all(warning in text for warning in warnings)
    assert (len(warnings) > 0) == ("smallest growth" in text or "times the MACs" in text)


def test_names_are_shown_as_text():
    """They are neither read as markup of rich or HTML, nor printed with control characters."""
    report = predicted_report("test_convnext")
    odd = replace(report.layers[0], stage="[red]<s>\x1b]0;title\x07", names=("[bold]n\x9b",))
    skipped = tuple(replace(skip, type="Conv\x1b[2J", reason="no\nway") for skip in report.skipped)
    plan = replace(report.plan, skipped=skipped, model="timm:\x1b]0;x\x07", layers=(odd,))
    report = predict_report(plan)
    short, long = (printed(report, verbose=verbose) for verbose in (0, 2))
    assert "[red]<s>" in short
    assert "[bold]n" in long
    page = report._repr_html_()
    assert "[red]<s>" in "".join(xml.etree.ElementTree.fromstring(page).itertext())
    for text in (short, long, page, report_markdown(report)):
        assert all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize(
    ("input_size", "says"),
    [
        ((4, 8, 8), "MACs stay the same: no window has more cells than the kernel"),
        (None, "MACs were not counted: no input size is known"),
    ],
)
def test_macs_that_stay_or_are_not_known_are_not_said_to_rise(input_size, says):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4))
    convs = find_convs(model, input_size=input_size)
    report = predict_report(plan_conversion(convs, dilated_size=3))
    long = " ".join(printed(report, verbose=1).split())
    assert says in long
    assert "MACs rise" not in long
    assert ("n/a" in report_markdown(report)) == (input_size is None)
