"""Views of a report are readable at 80 columns, without colour, and in a pipe."""

import io
import json
import xml.etree.ElementTree
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from torch import nn

from dcls_convert import find_convs, plan_conversion, predict_report
from dcls_convert.reports.outcome import Outcome, outcome_sentences
from dcls_convert.reports.report import report_markdown, report_view

from ..reports.predicted import predicted_report


def printed(report, *, verbose=0, width=80, **console):
    recorder = Console(width=width, file=io.StringIO(), **console)
    recorder.print(report_view(report, verbose=verbose))
    return recorder.file.getvalue()


def with_layers(report, layers):
    return replace(report, plan=replace(report.plan, layers=tuple(layers)))


def test_unchanged_macs_are_not_reported_as_rising():
    convs = find_convs(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), input_size=(4, 8, 8))
    report = predict_report(plan_conversion(convs, dilated_size=3))
    long = " ".join(printed(report, verbose=1).split())
    assert "MACs stay the same: no window has more cells than the kernel" in long
    assert "MACs rise" not in long


@pytest.mark.parametrize("name", ["convnext_tiny", "mixnet_s"])
def test_views_fit_80_columns_and_state_each_number(name):
    report = predicted_report(name)
    short, long, longest = [printed(report, verbose=verbose) for verbose in (0, 1, 2)]
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
    # No digit is lost at any width; names may be shortened.
    layers = tuple(replace(layer, names=("layer",), stage="stage") for layer in report.layers[-6:])
    for verbose in (0, 1):
        texts = [
            printed(with_layers(report, layers), verbose=verbose, width=width)
            for width in (30, 66, 200)
        ]
        first, *others = [Counter(filter(str.isdigit, text)) for text in texts]
        assert others == [first, first]
        assert "…" not in "".join(texts)


def test_a_notebook_shows_the_counts_of_each_stage_and_escapes_names():
    odd = "<script>\x1b]0;x\x07"
    report = predicted_report("convnext_tiny", dilated_size=17)
    first, *others = report.layers
    plan = replace(report.plan, model=odd, layers=(replace(first, stage=odd), *others))
    page = replace(report, plan=plan)._repr_html_()
    assert all(character.isprintable() or character == "\n" for character in page)
    text = "".join(xml.etree.ElementTree.fromstring(page).itertext())
    assert f"{report.budget.used:,} of {report.budget.limit:,}" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["stages.2"]]
    members = [layer for layer in report.layers if layer.stage == "stages.2"]
    # After the kernel, "7x7 → 17x17".
    assert (row[1], row[5]) == (str(len(members)), str(members[0].kernel_count))


def test_the_verdict_comes_first_in_thirteen_lines():
    report = predicted_report("convnext_tiny", dilated_size=17)
    lines = printed(report).splitlines()
    assert len(lines) <= 13
    assert " 4 tie groups share 97,920 positions; bilinear interpolation." in lines
    assert str(report) == "\n".join(lines)
    assert "28,587,688" in "".join(
        xml.etree.ElementTree.fromstring(report._repr_html_()).itertext()
    )
    assert f"| {report.params.after:,} |" in report_markdown(report)
    assert " ".join(lines[:2]) == (
        "28,589,128 → 28,587,688 parameters (-0.01 %), 4.46 → 4.97 G MACs (+11.6 %) "
        "34 elements in 17x17: timm:convnext_tiny, input 3x224x224"
    )


def test_a_column_has_one_unit():
    report = predicted_report("convnext_tiny", dilated_size=17)
    # One output and input channel: 123 * 10 and 123 * 10 * 10**6 MACs.
    small = replace(
        report.layers[0],
        **{"out_channels": 1, "in_channels": 1, "groups": 1, "output_positions": 123},
        **{"kernel_size": (1, 10), "dilated_size": (10_000, 1000)},
    )
    text = printed(with_layers(report, (small, *report.layers[5:])), width=120)
    assert "MACs, k" in text
    assert "1.23 → 1,230,000.00" in text


def test_colours_repeat_what_words_say():
    for colour, options in {"32": {}, "31": {"kernel_count": 40}}.items():
        report = predicted_report("test_convnext", **options)
        text = printed(report, force_terminal=True, color_system="standard")
        assert f"\x1b[1;{colour}m{report.params.before:,}" in text
    assert f"OVER BUDGET by {-report.budget.slack:,}" in " ".join(printed(report).split())


@pytest.mark.parametrize(
    ("size", "warning"),
    [
        ("auto", "Even the smallest growth adds 164 % to the MACs; rules can skip layers"),
        (5, "Even the smallest growth adds 164 % to the MACs; rules can skip layers"),
        (7, "5.1 times the MACs. Cheaper sizes are shown by"),
    ],
)
def test_a_costly_conversion_mentions_cheaper_sizes_only_if_there_are_any(size, warning):
    assert warning in printed(predicted_report("resnet18", dilated_size=size)).splitlines()


def test_the_growth_is_shown_if_kernels_have_several_sizes():
    mixed = printed(predicted_report("mobilenetv3_small_050")).splitlines()
    assert mixed[1].startswith("10 elements in 5x5..7x7 (+2): timm:mobilenetv3_small_050")
    assert "(+" not in printed(predicted_report("convnext_tiny")).splitlines()[1]


def test_each_stage_shows_its_own_counts():
    report = predicted_report("convnext_tiny", dilated_size=17)
    changed = replace(report.layers[0], kernel_count=31)
    report = with_layers(report, (changed, *report.layers[1:]))
    rows = [
        line.split() for line in printed(report).splitlines() if line.lstrip().startswith("stages.")
    ]
    counts = {row[0]: row[row.index("→") + 2] for row in rows}
    assert counts == {"stages.0": "31..34", "stages.1": "34", "stages.2": "34", "stages.3": "34"}


def test_names_reach_the_terminal_as_text():
    """They are neither read as rich markup, nor printed with control characters."""
    report = predicted_report("test_convnext")
    odd = replace(report.layers[0], stage="[red]s\x1b]0;title\x07", names=("[bold]n\x9b",))
    skipped = tuple(replace(skip, type="Conv\x1b[2J", reason="no\nway") for skip in report.skipped)
    plan = replace(report.plan, skipped=skipped, model="timm:\x1b]0;x\x07", layers=(odd,))
    report = replace(report, plan=plan)
    for verbose in (False, True):
        text = printed(report, verbose=verbose)
        assert "[bold]n" in text if verbose else "[red]s" in text
        assert all(character.isprintable() or character == "\n" for character in text)
    assert "\x1b" not in report_markdown(report)


def test_missing_macs_are_reported_as_missing():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4))
    report = predict_report(plan_conversion(find_convs(model), dilated_size=5))
    assert (report.macs.before, report.macs.after) == (None, None)
    assert "MACs were not counted: no input size is known" in " ".join(
        printed(report, verbose=1).split()
    )
    assert "MACs were not counted: no input size is known" in " ".join(str(report).split())
    assert json.loads(report.to_json())["macs"]["after"] is None
    assert "n/a" in report_markdown(report)


@pytest.mark.parametrize(("images", "percent"), [(1, ""), (9, ""), (16, " (100 %)")])
def test_a_share_of_few_images_is_not_a_percentage(images, percent):
    outcome = Outcome(kernel_error=0.2, images=images, fitted_images=4 * images, same_top1=1.0)
    (_, *lines) = outcome_sentences(outcome)
    noun = "image" if images == 1 else "images"
    assert lines[-1] == (
        f"On {images} held-out {noun}: {images} of {images} have the same top-1 class as before"
        f"{percent}."
    )


@pytest.mark.parametrize(
    ("images", "held_out"), [(2, "2 held-out images"), (10, "10 crops of 2 held-out images")]
)
def test_images_of_the_same_folder_are_said_to_be_and_their_crops_are_not_called_images(
    images, held_out
):
    outcome = Outcome(kernel_error=0.2, images=images, files_held_out=2, output_error=0.1)
    assert outcome_sentences(outcome)[-1] == (
        f"On {held_out} of the same folder (others may agree less): "
        "relative error of the outputs 0.100."
    )
