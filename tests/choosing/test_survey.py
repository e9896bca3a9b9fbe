"""`dcls-convert models`: how a conversion would change the models of both registries.

Tests of all models are marked `zoo`.
"""

import io
import json
import sys
import time
from dataclasses import fields

import pytest
import timm
import torchvision
from rich.console import Console

from dcls_convert.choosing.survey import (
    ModelRow,
    filter_and_sort_rows,
    model_row,
    names_matching,
    row_or_failure,
    survey_models,
)
from dcls_convert.errors import ModelError
from dcls_convert.planning.plan_options import PlanOptions
from dcls_convert.reports.costs import Change, MacsChange
from dcls_convert.views.survey import summary_line, survey_json, survey_view

from ..command_line import run
from ..conftest import TINY

KNOWN = ["timm:bat", "timm:resnet18", "timm:resnet18d", "torchvision:resnet18", "torchvision:vgg11"]


@pytest.fixture
def _known(monkeypatch):
    monkeypatch.setattr("dcls_convert.choosing.survey.registry_names", lambda: KNOWN)


@pytest.mark.parametrize(
    ("pattern", "names"),
    {
        None: KNOWN,
        "timm:*": KNOWN[:3],
        "resnet18": ["timm:resnet18", "torchvision:resnet18"],  # a whole name, so not resnet18d
        "resnet": ["timm:resnet18", "timm:resnet18d", "torchvision:resnet18"],  # a part of names
        "[rv]*1?": ["timm:resnet18", "torchvision:resnet18", "torchvision:vgg11"],
    }.items(),
)
@pytest.mark.usefixtures("_known")
def test_patterns_match_names(pattern, names):
    assert names_matching(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "suggestion"),
    {"resnet81": "resnet18", "timm:resnet1_*": "resnet18", "": None}.items(),
)
@pytest.mark.usefixtures("_known")
def test_a_pattern_that_matches_nothing_gets_a_suggestion(pattern, suggestion):
    with pytest.raises(ModelError, match="no model of timm or torchvision matches") as error:
        names_matching(pattern)
    assert (f"did you mean {suggestion!r}" in str(error.value)) == (suggestion is not None)
    assert "\n" not in str(error.value)


def test_macs_that_depend_on_the_image_are_not_counted():
    row = model_row("torchvision:maskrcnn_resnet50_fpn", PlanOptions())
    assert (row.status, row.macs.before, row.macs.after) == ("planned", None, None)
    assert "what a MaskRCNN computes depends on how many regions it finds" in row.macs.note


ROWS = [
    ModelRow(
        name="timm:b",
        status="planned",
        replaced={"depthwise 3x3": 9},
        kernel_counts=(5, 7),
        params=Change(before=3),
        macs=MacsChange(before=10),
    ),
    ModelRow(
        name="torchvision:a",
        status="planned",
        replaced={"dense 3x3": 2},
        kernel_counts=(6,),
        params=Change(before=1),
        macs=MacsChange(before=30),
    ),
    ModelRow(name="timm:c", status="failed", reason="no"),
    ModelRow(
        name="timm:d",
        status="nothing matches",
        reason="no",
        params=Change(before=2),
        macs=MacsChange(before=20),
    ),
]


@pytest.mark.parametrize(
    ("sort", "order"),
    {
        "name": "abcd",
        "params": "adbc",
        "macs": "bdac",
        "count": "abcd",  # by the largest count
        "layers": "abcd",
        None: "bacd",
    }.items(),
)
def test_models_are_sorted_and_unknown_values_come_last(sort, order):
    assert "".join(row.name[-1] for row in filter_and_sort_rows(ROWS, sort=sort)) == order


@pytest.mark.parametrize(
    ("kind", "expected"), {"depthwise": "bc", "dense": "ac", "grouped": "c", None: "bacd"}.items()
)
def test_models_are_filtered_by_replaced_kind_and_failures_stay(kind, expected):
    assert "".join(row.name[-1] for row in filter_and_sort_rows(ROWS, kind=kind)) == expected


def test_a_planned_row_has_the_papers_numbers_and_one_without_matches_names_its_convolutions():
    row = model_row("timm:convnext_tiny", PlanOptions(dilated_size=17))
    assert (row.status, row.reason) == ("planned", None)
    assert row.convolutions == {"depthwise 7x7": 18, "dense 2x2": 3, "dense 4x4 in the stem": 1}
    assert row.replaced == {"depthwise 7x7": 18}
    assert (row.kernel_counts, row.dilated_sizes) == ((34,), ((17, 17),))
    assert row.params == Change(before=28_589_128, after=28_587_688)
    assert row.macs.before == 4_455_531_264
    row = model_row("torchvision:vit_b_16", PlanOptions())
    assert row.status == "nothing matches"
    assert "it has 1 dense 16x16 in the stem" in row.reason
    assert (row.params, row.macs.after) == (Change(before=86_567_656), None)


@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        ({"dilated_size": 16}, None, "window 16 (axis 0 of 16x16) must be odd as the kernel 7 is"),
        ({}, (3, 1, 1), "input size 3x1x1"),
        ({}, (3, 16, 112, 112), "the model is 2-D"),
    ],
)
def test_an_option_that_does_not_fit_a_model_is_the_reason_in_its_row(options, size, reason):
    row = model_row(f"timm:{TINY}", PlanOptions(**options), size)
    assert row.status == "does not fit"
    assert reason in row.reason


FULL = ModelRow(
    name="timm:a",
    status="failed",
    reason='a "quoted", reason',
    convolutions={"dense 3x3": 2},
    replaced={"dense 3x3": 1},
    kept={"a reason": 1},
    dilated_sizes=((7, 7),),
    growth=4,
    kernel_counts=(5, 6),
    rules="mine.yaml",
    input_size=(3, 8, 8),
    params=Change(before=10, after=9),
    macs=MacsChange(before=20, after=30, note="a note"),
)


def test_json_contains_every_field_of_a_row():
    empty = ModelRow(name="timm:b", status="failed")
    for field in fields(FULL):
        if field.name != "status":
            assert getattr(FULL, field.name) != getattr(empty, field.name)
    text = survey_json([FULL, empty], PlanOptions(dilated_size=9), pattern="*", input_size=None)
    data = json.loads(text)
    assert {"pattern": "*", "dilated_size": 9, "rules": "auto", "budget": 100.0}.items() <= data[
        "options"
    ].items()
    assert data["summary"] == {
        "models": 2,
        "planned": 0,
        "nothing_matches": 0,
        "does_not_fit": 0,
        "failed": 2,
    }
    unchanged = {
        name: getattr(FULL, name)
        for name in "name status reason rules convolutions replaced kept".split()
    }
    assert data["models"][0] == unchanged | {
        "input_size": [3, 8, 8],
        "dilated_sizes": [[7, 7]],
        "growth": 4,
        "kernel_counts": [5, 6],
        "params": {"before": 10, "after": 9, "delta": -1},
        "macs": {"before": 20, "after": 30, "delta": 10, "note": "a note"},
    }
    assert data["models"][0].keys() == data["models"][1].keys()


def test_convolutions_that_stay_although_a_rule_matches_them_are_counted_with_the_reason():
    row = model_row("torchvision:inception_v3", PlanOptions(dilated_size="+2"))
    ((reason, count),) = row.kept.items()
    assert reason.startswith("its padding of 0 does not centre its kernel of 3")
    assert count == 6
    assert row.replaced == {"dense 3x3": 10}
    recorder = Console(width=300, file=io.StringIO(), highlight=False)
    recorder.print(survey_view([row]))
    assert f"torchvision:inception_v3: keeps 6 convolutions: {reason}" in recorder.file.getvalue()


def test_the_table_has_a_line_for_each_model_and_repeats_the_failures():
    recorder = Console(width=160, file=io.StringIO(), highlight=False)
    planned = model_row(f"timm:{TINY}", PlanOptions())
    mixed = model_row("timm:mobilenetv3_small_050", PlanOptions())
    failed = ModelRow(
        name="timm:b", status="failed", reason="its process was killed [by] SIGKILL\x1b"
    )
    recorder.print(survey_view([planned, mixed, failed]))
    lines = recorder.file.getvalue().splitlines()
    (line,) = [line for line in lines if line.startswith(f"timm:{TINY} ")]
    assert "9 depthwise 7x7 → 9x9  " in line
    assert f" {planned.kernel_counts[0]} " in line
    (line,) = [line for line in lines if line.startswith("timm:mobilenetv3_small_050 ")]
    assert "8 depthwise 5x5, 3 depthwise 3x3 → 5x5..7x7 (+2)" in line
    assert [lines[-2], lines[-1]] == [
        "failed: timm:b: its process was killed [by] SIGKILL\\x1b",
        "3 models: 2 planned, 0 nothing matches, 1 failed",
    ]


@pytest.mark.processes
def test_stdout_is_only_json_and_a_failed_model_is_exit_code_1(monkeypatch):
    names = ["torchvision:vit_b_32", "timm:no_such_model", f"timm:{TINY}", "timm:test_mambaout"]
    monkeypatch.setattr("dcls_convert.choosing.survey.registry_names", lambda: names)
    arguments = (
        "--json",
        "--dilated-size",
        9,
        "--tie",
        "none",
        "--kind",
        "depthwise",
        "--sort",
        "macs",
        "--jobs",
        1,
    )
    out, err = run("models", *arguments, code=1)
    data = json.loads(out)
    assert list(data) == ["format", "options", "models", "summary"]
    rows = [model_row(name, PlanOptions(dilated_size=9, tie="none")) for name in names]
    rows = filter_and_sort_rows(rows, kind="depthwise", sort="macs")
    assert (
        data["models"]
        == json.loads(survey_json(rows, PlanOptions(), pattern=None, input_size=None))["models"]
    )
    assert [row["status"] for row in data["models"]] == ["planned", "planned", "failed"]
    assert err.splitlines()[-1] == "3 models: 2 planned, 0 nothing matches, 1 failed"
    assert "failed: timm:no_such_model: " in err


def test_a_model_whose_code_raises_anything_is_a_row_with_the_reason(monkeypatch):
    def end(*_):
        sys.exit("hoarse\x1b[2J")

    monkeypatch.setattr("dcls_convert.choosing.survey.model_row", end)
    row = row_or_failure("timm:shout", PlanOptions())
    assert (row.status, row.reason) == ("failed", "SystemExit: hoarse\\x1b[2J")


@pytest.mark.processes
def test_without_a_replaced_convolution_of_the_kind_a_line_says_so(monkeypatch):
    monkeypatch.setattr("dcls_convert.choosing.survey.registry_names", lambda: KNOWN)
    out, _ = run("models", "resnet18", "--kind", "depthwise", "--jobs", 1)
    assert out == (
        "No depthwise convolution is replaced in 2 models (timm:resnet18, torchvision:resnet18).\n"
    )


def test_an_option_that_the_rules_override_is_refused_once(tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("format: 1\nrules:\n- {match: {kind: depthwise}, dilated_size: 9}\n")
    _, err = run("models", "--rules", rules, "--dilated-size", 11, code=2)
    assert "every rule states its own dilated_size, so the option has no effect" in err


# All models; without the marker `zoo`, only the first model of each module of the libraries.


def module_of(name):
    library, _, bare = name.partition(":")
    builder = (
        timm.model_entrypoint(bare)
        if library == "timm"
        else torchvision.models.get_model_builder(bare)
    )
    return builder.__module__


@pytest.mark.parametrize(
    "all_models",
    [pytest.param(True, marks=pytest.mark.zoo), pytest.param(False, marks=pytest.mark.processes)],
)
def test_every_model_is_planned_or_its_row_says_why_not(all_models):
    names = names_matching(None)
    assert len(names) == len(timm.list_models()) - timm.is_model("dcls_convert") + len(
        torchvision.models.list_models()
    )
    if not all_models:
        names = [*{module_of(name): name for name in reversed(names)}.values()]
    started = time.monotonic()
    rows = survey_models(names, PlanOptions(), workers=2)
    print(f"\n{summary_line(rows)}; {time.monotonic() - started:.0f} s")
    assert [row.name for row in rows] == names
    assert [
        f"{row.name}: {row.reason}"
        for row in rows
        if row.status not in ("planned", "nothing matches")
    ] == []
    for row in rows:
        if row.status == "planned":
            assert row.replaced, row
            assert row.params.after <= row.params.before, row
        else:
            assert "it has" in row.reason, row
        assert (row.macs.before is None) == (row.macs.note is not None), row
