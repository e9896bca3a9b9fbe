"""The command line as its user meets it."""

import inspect
import json
import re
import subprocess
import sys
import sysconfig
from dataclasses import fields, replace
from pathlib import Path

import pytest
import timm
import torch

import dcls_convert
from dcls_convert.checkpoints.folder import FILES
from dcls_convert.cli.app import main
from dcls_convert.cli.arguments import HOW_MANY, OUTPUT, PLANNING, WHAT, WHERE
from dcls_convert.cli.convert import convert
from dcls_convert.cli.models import models
from dcls_convert.errors import NothingMatchesError
from dcls_convert.options import PlanOptions
from dcls_convert.planning.rules import load_rules

from ..conftest import TINY

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "dcls-convert")
OWN_MODULE = """
from torch import nn

def build(num_classes=3):
    convs = [nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
"""


def run(*arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == code


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_main_job(capsys):
    run(TINY, "--dilated-size", "17")
    out, err = capsys.readouterr()
    assert {path.name for path in Path(f"{TINY}-dcls17").iterdir()} == set(FILES)
    assert f"timm:{TINY} to DCLS, input 3x160x160" in out
    assert "random initialisation (seed 0)" in out
    for step in ("planning", "building", "converting", f"writing {TINY}-dcls17"):
        assert f"{TINY}: {step}" in err
    snippet = re.search(r"Fine-tune it:\n\n(.*)", out, re.DOTALL)[1]
    names: dict[str, torch.nn.Module] = {}
    exec("\n".join(line[4:] for line in snippet.splitlines()), names)
    assert names["model"].num_classes == 10


@pytest.mark.parametrize("arguments", [["--dilated-size", "9", TINY], ["convert", "--dilated-size", "9", TINY]])
def test_convert_is_the_default_command(arguments):
    run(*arguments, "--quiet")
    assert Path(f"{TINY}-dcls9", "config.json").is_file()


def test_every_planning_option_is_an_argument_of_the_commands_that_plan():
    """Names and defaults stand in the record alone."""
    defaults = {field.name: field.default for field in fields(PlanOptions)}
    assert list(PLANNING) == list(defaults)
    for command in (convert, models):
        parameters = inspect.signature(command).parameters
        assert {name: parameters[name].default for name in PLANNING} == defaults


@pytest.mark.parametrize("name", PLANNING)
def test_a_planning_option_reaches_the_plan(monkeypatch, name):
    given = {
        "dilated_size": ("9x11", (9, 11)),
        "kernel_count": ("7", 7),
        "rules": ("depthwise", load_rules("depthwise")),
        "scope": ("stage", "stage"),
        "tie": ("none", "none"),
        "budget": ("90.5", 90.5),
        "interpolation": ("gaussian", "gaussian"),
        "strict": (None, True),
    }
    seen = []

    def plan(_model, options, *_, **__):
        seen.append(options)
        raise NothingMatchesError("enough")

    monkeypatch.setattr("dcls_convert.surgery.convert.plan_for", plan)
    monkeypatch.setattr("dcls_convert.reports.survey.survey_models", plan)
    text, value = given[name]
    for command in ([TINY], ["models", TINY]):
        run(*command, f"--{name.replace('_', '-')}", *([text] if text else []), code=3)
    assert seen == [replace(PlanOptions(), **{name: value})] * 2


def test_a_plan_is_carried_out_on_other_weights_of_the_same_model(capsys):
    run(TINY, "--budget", "60", "--output", "first", "--quiet")
    run(TINY, "--plan", "first", "--seed", "1", "--output", "second", "--quiet")
    plans = []
    for folder in ("first", "second"):
        capsys.readouterr()
        run("inspect", folder, "--plan")
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert plans[0]["share"] == "3/5"
    assert Path("first/model.safetensors").read_bytes() != Path("second/model.safetensors").read_bytes()
    run("resnet18", "--plan", "first", code=2)
    run(TINY, "--num-classes", "5", "--plan", "first", code=2)


def test_json_is_all_of_stdout_and_equals_the_folders_report(capsys):
    run(TINY, "--json", "--output", "out")
    out, _ = capsys.readouterr()
    data = json.loads(out)
    assert data["output"] == "out"
    assert data | {"output": "."} == json.loads(Path("out/report.json").read_text())


def test_dry_run_writes_nothing_builds_nothing_and_predicts_the_truth(capsys, monkeypatch):
    run(TINY, "--json", "--output", "out")
    real = json.loads(capsys.readouterr().out)

    def no_weights(*_args, **_kwargs):
        raise AssertionError("a dry run must not touch weights or the network")

    monkeypatch.setattr("socket.socket.connect", no_weights)
    monkeypatch.setattr("torch.load", no_weights)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", no_weights)
    monkeypatch.setattr("dcls_convert.networks.weights.load_file", no_weights)
    run(TINY, "--pretrained", "--dry-run", "--json")
    assert json.loads(capsys.readouterr().out) == real | {"output": None}
    assert [path.name for path in Path().iterdir()] == ["out"]


def test_quiet_prints_the_folder_alone(capsys):
    run(TINY, "--quiet")
    assert capsys.readouterr() == (f"{TINY}-dcls17\n", "")


def test_sizes_name_the_folder(capsys):
    run(TINY, "--dilated-size", "9x11", "--quiet")
    assert capsys.readouterr().out == f"{TINY}-dcls9x11\n"
    Path("rules.yaml").write_text(
        "format: 1\nrules:\n- {match: {stage: stages.0}, dilated_kernel_size: 9}\n- {match: {kind: depthwise}}\n"
    )
    run(TINY, "--rules", "rules.yaml", "--dilated-size", "11", "--quiet")
    assert capsys.readouterr().out == f"{TINY}-dcls\n"


def test_own_factory_is_run_with_its_arguments(capsys):
    Path("mine.py").write_text(OWN_MODULE)
    run("mine:build", "--num-classes", "5", "--dilated-size", "7", "--input-size", "3x32x32", "--seed", "3")
    out, _ = capsys.readouterr()
    assert 'load_converted("build-dcls7", trust_code=True)' in out
    sys.modules.pop("mine")
    model = dcls_convert.load_converted("build-dcls7", trust_code=True)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    sys.modules.pop("mine")


def test_torchvision_models_convert(capsys):
    run("torchvision:mobilenet_v3_small", "--dilated-size", "9", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["input_size"] == [3, 224, 224]
    assert data["params"]["after"] <= data["params"]["before"] == 2_542_856  # torchvision's documentation
    loaded = dcls_convert.load_converted("mobilenet_v3_small-dcls9")
    by_timm = timm.create_model("local-dir:mobilenet_v3_small-dcls9", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(x), by_timm(x))


def test_seed_decides_everything_random():
    for folder, seed in [("a", "1"), ("b", "1"), ("c", "2")]:
        run(TINY, "--seed", seed, "--output", folder, "--quiet")
    weights = {name: Path(name, "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]


def test_uniform_positions_fill_the_window():
    run(TINY, "--positions", "uniform", "--quiet", "--output", "uniform")
    run(TINY, "--quiet", "--output", "normal")
    spread = {}
    for name in ("uniform", "normal"):
        positions = dcls_convert.load_converted(name).stages[3].blocks.dcls_positions
        assert positions.abs().max() <= 8
        spread[name] = positions.std().item()
    assert spread["normal"] == pytest.approx(0.5, rel=0.05)  # cells; the paper's N(0, 0.5)
    assert spread["uniform"] == pytest.approx(16 / 12**0.5, rel=0.05)


def test_rules_commands(capsys):
    run("rules", "list")
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {
        "conv3x3",
        "dense3x3",
        "dense3x3x3",
        "depthwise",
    }
    run("rules", "show", "depthwise")
    Path("copy.yaml").write_text(capsys.readouterr().out)
    run("rules", "check", "copy.yaml", "--model", TINY)
    assert "depthwise: converts 9 of 13 convolutions" in capsys.readouterr().out
    run("rules", "schema")
    assert json.loads(capsys.readouterr().out)["title"] == "RuleSet"


def test_help_names_every_option_in_a_group(capsys, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "120")
    run("convert", "--help")
    out = capsys.readouterr().out
    for parameter in inspect.signature(convert).parameters.values():
        if parameter.name != "model":
            option = f"--{parameter.name.rstrip('_').replace('_', '-')}"
            assert f" {option} " in out
    groups = [line.split("─ ")[1].split(" ─")[0] for line in out.splitlines() if line.startswith("╭")]
    assert groups == ["Arguments", "Options", WHAT, HOW_MANY, WHERE, OUTPUT]


@pytest.mark.parametrize("command", [["convert", "--help"], ["rules", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_library_that_takes_long(command):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", PROGRAM, *command], capture_output=True, text=True, check=True
    )
    imported = set(re.findall(r"\|\s+(\S+)$", done.stderr, flags=re.MULTILINE))
    assert "dcls_convert.cli.app" in imported
    assert imported & {"torch", "numpy", "pydantic", "yaml"} == set()


def test_process_with_warnings_as_errors_in_a_pipe_gives_the_same_bytes():
    """Python -W error, stdout and stderr piped; and equal bytes from another process."""
    run(TINY, "--quiet", "--output", "here")
    arguments = [sys.executable, "-W", "error", "-m", "dcls_convert", TINY, "--output", "there"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert all(line.startswith(f"{TINY}: ") for line in done.stderr.splitlines()), done.stderr
    for file in FILES:
        assert Path("here", file).read_bytes() == Path("there", file).read_bytes(), file


def test_torch_and_torchvision_that_do_not_fit_are_one_line(capsys, monkeypatch):
    import importlib

    real = importlib.import_module

    def import_module(name, *rest):
        if name == "timm":
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, *rest)

    monkeypatch.setattr("dcls_convert.networks.source.importlib.import_module", import_module)
    run(TINY, code=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: timm cannot be imported: operator torchvision::nms does not exist; install matching")
    assert "pip install --upgrade torch torchvision timm" in last
