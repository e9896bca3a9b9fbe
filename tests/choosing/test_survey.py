"""`dcls-convert models`: how a conversion would change the models of both registries.

Tests of all models are marked `zoo`.
"""

import io
import json
import os
import sys
from dataclasses import fields

import pytest
import timm
import torchvision
from rich.console import Console
from torch import nn

from dcls_convert.choosing.survey import (
    ModelRow,
    model_row,
    names_matching,
    survey,
    survey_json,
    survey_view,
)
from dcls_convert.errors import ModelError
from dcls_convert.planning.plan_options import PlanOptions
from dcls_convert.planning.rule_files import load_rules
from dcls_convert.reports.costs import Change, MacsChange

from ..command_line import run
from ..conftest import TINY

KNOWN = ["timm:bat", "timm:resnet18", "timm:resnet18d", "torchvision:resnet18", "torchvision:vgg11"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    {
        "timm:*": KNOWN[:3],
        "ResNet18": ["timm:resnet18", "torchvision:resnet18"],  # a whole name, so not resnet18d
        "resnet": ["timm:resnet18", "timm:resnet18d", "torchvision:resnet18"],  # a part of names
        "[rv]*1?": ["timm:resnet18", "torchvision:resnet18", "torchvision:vgg11"],
    }.items(),
)
def test_patterns_match_names(monkeypatch, pattern, names):
    monkeypatch.setattr("dcls_convert.choosing.survey.registry_names", lambda: KNOWN)
    assert names_matching(pattern) == names


def test_a_pattern_that_matches_nothing_gets_a_suggestion():
    with pytest.raises(ModelError, match=r"matches 'timm:resnet81_\*' .*did you mean 'resnet18'"):
        names_matching("timm:resnet81_*")


def test_a_planned_row_has_the_papers_numbers():
    row = model_row("timm:convnext_tiny", PlanOptions(dilated_size=17))
    assert (row.status, row.reason) == ("planned", None)
    assert row.convolutions == {"depthwise 7x7": 18, "dense 2x2": 3, "dense 4x4 in the stem": 1}
    assert row.replaced == {"depthwise 7x7": 18}
    assert (row.kernel_counts, row.dilated_sizes) == ((34,), ((17, 17),))
    assert row.params == Change(before=28_589_128, after=28_587_688)
    assert row.macs.before == 4_455_531_264


@pytest.mark.parametrize(
    ("name", "options", "status", "reason"),
    [
        ("torchvision:vit_b_16", {}, "nothing matches", "it has 1 dense 16x16 in the stem"),
        (f"timm:{TINY}", {"dilated_size": 16}, "does not fit", "must be odd as the kernel 7 is"),
    ],
)
def test_a_row_says_why_a_model_is_not_planned(name, options, status, reason):
    row = model_row(name, PlanOptions(**options))
    assert row.status == status
    assert reason in row.reason
    assert row.macs.after is row.params.after is None


def test_json_contains_every_field_of_a_row():
    planned = model_row(f"timm:{TINY}", PlanOptions())
    empty = ModelRow(name="timm:b", status="does not fit")
    first, second = json.loads(survey_json([planned, empty], PlanOptions(), None, "*"))["models"]
    assert first.keys() == second.keys() == {field.name for field in fields(ModelRow)}
    assert first["params"]["delta"] == planned.params.after - planned.params.before
    assert first["macs"]["delta"] == planned.macs.after - planned.macs.before


def test_the_table_has_a_line_for_each_model():
    planned = ModelRow(
        name="timm:a",
        status="planned",
        replaced={"dense 3x3": 1},
        kept={"a reason": 1},
        dilated_sizes=((7, 7),),
        growth=4,
        kernel_counts=(5, 6),
        params=Change(before=10, after=9),
        macs=MacsChange(before=20, after=30),
    )
    rows = [
        planned,
        ModelRow(name="timm:c", status="nothing matches", convolutions={"dense 1x1": 2}),
        ModelRow(name="timm:b", status="failed", reason="RuntimeError: no [image]\x1b"),
    ]
    recorder = Console(width=160, file=io.StringIO(), highlight=False)
    recorder.print(survey_view(rows))
    _, _, *lines = recorder.file.getvalue().splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "timm:a 1 dense 3x3 → 7x7 (+4); keeps 1 5..6 10 → 9 20 → 30",
        "timm:c nothing; it has 2 dense 1x1 n/a n/a",
        "timm:b failed: RuntimeError: no [image]\\x1b n/a n/a",
        "",
        "3 models: 1 planned, 1 nothing matches, 0 does not fit, 1 failed",
    ]


# Models in other processes.


class Hostile(nn.Module):
    def named_modules(self, *_, **__):
        sys.exit("hoarse\x1b[2J")


def works():
    os.write(1, b"printed")  # as C would
    return nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6))


@pytest.mark.processes
def test_a_model_that_raises_or_prints_is_a_row_and_the_others_are_planned(capfd):
    names = [f"{__name__}:works", f"{__name__}:Hostile", "timm:no_such_model", f"timm:{TINY}"]
    rows = survey(names, PlanOptions(), workers=1)
    assert [row.name for row in rows] == names
    assert [row.status for row in rows] == ["planned", "failed", "failed", "planned"]
    assert rows[1].reason == "SystemExit: hoarse\\x1b[2J"
    assert rows[3] == model_row(names[3], PlanOptions())
    assert capfd.readouterr() == ("", "")


@pytest.mark.processes
def test_stdout_is_only_json_and_a_failed_model_is_exit_code_1(monkeypatch):
    names = [f"timm:{TINY}", "timm:no_such_model"]
    monkeypatch.setattr("dcls_convert.choosing.survey.registry_names", lambda: names)
    size = ("--dilated-size", "9x11", "--rules", "depthwise", "--strict", "--jobs", 1)
    more = ("--tie", "none", "--budget", "90.5%", "--interpolation", "gaussian")
    out, err = run("models", "--json", *size, *more, code=1)
    asked = PlanOptions(
        dilated_size=(9, 11),
        rules=load_rules("depthwise"),
        strict=True,
        tie="none",
        budget=90.5,
        interpolation="gaussian",
    )
    assert out == survey_json([model_row(name, asked) for name in names], asked, None, "*")
    assert err.splitlines() == [f"models: timm:{TINY}, 1 of 2"]


# All models; without the marker `zoo`, only the first model of each module of the libraries.


def module_of(name):
    library, _, bare = name.partition(":")
    if library == "timm":
        return timm.model_entrypoint(bare).__module__
    return torchvision.models.get_model_builder(bare).__module__


@pytest.mark.parametrize(
    "all_models",
    [pytest.param(True, marks=pytest.mark.zoo), pytest.param(False, marks=pytest.mark.processes)],
)
def test_every_model_is_planned_or_its_row_says_why_not(all_models):
    names = names_matching("*")
    assert len(names) == len(timm.list_models()) - timm.is_model("dcls_convert") + len(
        torchvision.models.list_models()
    )
    if not all_models:
        names = [*{module_of(name): name for name in reversed(names)}.values()]
    rows = survey(names, PlanOptions(), workers=2)
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.status in ("planned", "nothing matches"), row
        if row.status == "planned":
            assert row.replaced, row
            assert row.params.after <= row.params.before, row
        else:
            assert "it has" in row.reason, row
        assert (row.macs.before is None) == (row.macs.note is not None), row
