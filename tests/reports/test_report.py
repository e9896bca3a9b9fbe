"""The report is data first; its views read well at 80 columns, without colour, and in a pipe."""

import io
import json

import pytest
import timm
import torch
from rich.console import Console

from dcls_convert import find_convs, plan_conversion, predict_report
from dcls_convert.reports.report import Change
from dcls_convert.reports.report_view import report_markdown, report_view


def report_of(name: str, **options):
    with torch.device("meta"):
        model = timm.create_model(name)
    return predict_report(plan_conversion(find_convs(model), model=f"timm:{name}", **options))


def printed(report, *, verbose: bool = False, **console) -> str:
    recorder = Console(width=80, file=io.StringIO(), **console)
    recorder.print(report_view(report, verbose=verbose))
    return recorder.file.getvalue()


def test_json_has_the_documented_shape():
    data = json.loads(report_of("convnext_tiny", dilated_size=17).with_output("convnext_tiny-dcls17").to_json())
    assert (data["format"], data["model"], data["input_size"]) == (1, "timm:convnext_tiny", [3, 224, 224])
    assert data["output"] == "convnext_tiny-dcls17"
    documented = {"before": 28589128, "after": 28587688, "delta": -1440}
    assert documented.items() <= data["params"].items()
    assert (data["params"]["weights"], data["params"]["positions"]) == (225_216, 97_920)
    assert data["macs"]["before"] == 4455531264
    assert data["macs"]["delta"] == data["macs"]["after"] - data["macs"]["before"]
    budget = {"scope": "model", "limit": 324576, "used": 323136, "exact_count": 34.15}
    assert budget.items() <= data["budget"].items()
    first = data["layers"][0]
    assert {
        "name": "stages.0.blocks.0.conv_dw",
        "stage": "stages.0",
        "kind": "depthwise",
        "kernel_size": [7, 7],
        "dilated_size": [17, 17],
        "kernel_count": 34,
        "interpolation": "bilinear",
        "tie_group": "stages.0",
        "params_before": 96 * 50,
        "params_after": 96 * (34 + 1) + 2 * 96 * 34,  # weights, bias, and the positions of the whole group
        "macs_before": 96 * 49 * 56 * 56,
        "macs_after": 96 * 289 * 56 * 56,
        "fit_error": None,
    }.items() <= first.items()
    assert data["skipped"][0].keys() == {"name", "type", "reason"}
    rows = data["layers"]
    assert sum(row["params_after"] for row in rows) + data["params_untouched"] == data["params"]["after"]
    assert sum(row["params_before"] for row in rows) + data["params_untouched"] == data["params"]["before"]
    assert sum(row["macs_after"] for row in rows) + data["macs_untouched"] == data["macs"]["after"]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", ["convnext_tiny", "resnet50", "mixnet_s", "mobilenetv3_large_100"])
def test_views_keep_to_80_columns_without_colour(name, verbose):
    report = report_of(name)
    text = printed(report, verbose=verbose)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for number in (report.params.before, report.params.after, report.macs.before, report.macs.after):
        assert f"{number:,}" in text
    assert f"{report.params.delta:+,}" in text
    assert f"{report.macs.percent:+.2f} %" in text
    assert "MACs rise although parameters do not" in text
    if verbose:
        assert all(layer.name in text.replace("\n", "") for layer in report.layers)
    else:
        assert all(layer.stage in text for layer in report.layers)


def test_names_are_not_read_as_markup():
    report = report_of("convnext_tiny", rules="depthwise")
    assert "[bold]" not in printed(report, force_terminal=True)
    odd = type(report.layers[0])(
        **{**{f: getattr(report.layers[0], f) for f in report.layers[0].__slots__}, "stage": "[red]s"}
    )
    text = printed(type(report)(**{**{f: getattr(report, f) for f in report.__slots__}, "layers": (odd,)}))
    assert "[red]s" in text


def test_several_counts_and_an_exceeded_budget_are_said():
    text = printed(report_of("convnext_tiny", scope="stage"))
    assert "29" in text
    assert "40" in text
    over = printed(report_of("convnext_tiny", kernel_count=40))
    assert "OVER BUDGET by 55,584" in " ".join(over.split())
    assert "MACs rise with the window" in over


def test_missing_macs_are_said_and_not_made_up():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1, groups=4))
    report = predict_report(plan_conversion(find_convs(model), dilated_size=5))
    assert report.macs == Change(before=None, after=None)
    text = " ".join(printed(report).split())
    assert "MACs were not counted: no input size is known" in text
    assert json.loads(report.to_json())["macs"]["after"] is None
    assert "n/a" in report_markdown(report)


def test_markdown_tables_are_well_formed():
    report = report_of("convnext_tiny")
    tables = [block for block in report_markdown(report).split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert f"{report.params.after:,}" in tables[1]
