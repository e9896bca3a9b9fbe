"""The command line as a user sees it."""

import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import typer
from torch import nn

from dcls_convert import load_converted
from dcls_convert.checkpoints.folder import FILES
from dcls_convert.cli.app import app

from ..command_line import NET, imported_by, net, run
from ..conftest import TINY

SMALL = ("--input-size", "3x32x32")  # for speed


def test_a_conversion_writes_its_folder_and_tells_each_step():
    out, err = run(TINY, *SMALL, "--dilated-size", 17)
    assert {path.name for path in Path(f"{TINY}-dcls17").iterdir()} == set(FILES)
    assert "random initialisation (seed 0)" in out
    steps = [line.removeprefix(f"{TINY}: ") for line in err.splitlines()]
    assert {"planning", "building", "converting"} <= set(steps)
    assert steps[-1] == f"writing {TINY}-dcls17"


@pytest.mark.parametrize(
    "command", ["", *typer.main.get_command(app).commands, "rules check", "rules list"]
)
def test_help_fits_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = run(*command.split(), "--help")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_shell_completes_commands_without_waiting_for_torch(monkeypatch):
    # The environment in which bash asks a program what to complete.
    monkeypatch.setenv("_DCLS_CONVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "dcls-convert con")
    monkeypatch.setenv("COMP_CWORD", "1")
    done, modules = imported_by("-m", "dcls_convert")
    assert modules & {"torch", "timm", "torchvision", "numpy", "yaml"} == set()
    assert done.returncode == 0
    assert "convert" in done.stdout


def test_what_is_to_be_pasted_is_python_whatever_the_folder_is_called():
    name = 'it\'s a "b",\nlines\\{brace}é\x1b[0m'
    out, _ = run(TINY, *SMALL, "--dilated-size", 9, "--output", name)
    snippet = re.search(r"Train it:\n\n(.*)", out, re.DOTALL)[1]
    exec("\n".join(line[4:] for line in snippet.splitlines()), {})
    assert load_converted(f"{name}-tuned").num_classes == 1000  # the trained head stays


def test_an_output_that_exists_is_refused_before_anything_is_converted(monkeypatch):
    run(NET, *SMALL, "--dilated-size", "9", "--quiet")
    monkeypatch.setattr("dcls_convert.conversion.open_network.build_and_load", None)
    assert "9 already exists" in run(NET, *SMALL, "--dilated-size", "9", code=2)[1]


def test_a_plan_is_carried_out_on_other_weights_of_the_same_model():
    options = ("--dilated-size", "9", "--budget", "60", "--quiet")
    run(NET, *SMALL, *options, "--output", "first")
    run(NET, "--plan", "first", "--seed", "1", "--output", "second", "--quiet")
    first, second = (
        json.loads(run("inspect", folder, "--plan")[0]) for folder in ("first", "second")
    )
    assert first == second
    assert first["share"] == "3/5"
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("first", "second")]
    assert weights[0] != weights[1]
    for other in ([TINY], [NET, "--num-classes", "5"]):
        assert "the plan is for" in run(*other, "--plan", "first", code=2)[1]


def test_json_is_all_of_stdout_and_a_dry_run_predicts_it_without_weights(monkeypatch):
    real = json.loads(run(TINY, "--json", "--output", "out")[0])
    assert (real["format"], real["model"]) == (1, f"timm:{TINY}")
    assert (real["input_size"], real["output"]) == ([3, 160, 160], "out")
    assert real | {"output": "."} == json.loads(Path("out/report.json").read_text())
    for name in (
        "socket.socket.connect",
        "torch.load",
        "timm.models._hub.hf_hub_download",
        "dcls_convert.weights.files.load_safetensors",
    ):
        monkeypatch.setattr(name, None)
    out, _ = run(TINY, "--pretrained", "--dry-run", "--json")
    assert json.loads(out) == real | {"output": None}
    assert [path.name for path in Path().iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("net-dcls17", "--dilated-size 17"),
        ("net-dcls9x11", "--dilated-size 9x11"),
        # --rules comes first on the command line, and must not be taken for the command `rules`.
        ("net-dcls", "--rules rules.yaml --dilated-size 11"),
    ],
)
def test_quiet_prints_the_folder_alone_and_sizes_name_it(folder, options):
    Path("rules.yaml").write_text(
        "format: 1\nrules:\n"
        "- {match: {stage: stages.0}, dilated_size: 9}\n- {match: {kind: depthwise}}\n"
    )
    assert run(*options.split(), NET, *SMALL, "--quiet") == (f"{folder}\n", "")


def test_own_factory_is_run_with_its_arguments():
    Path("mymodel.py").write_text(
        f"import torch\nfrom {net.__module__} import net\nSTD = torch.tensor(0.5)\n"
        "def build(**arguments):\n"
        "    assert float(STD) == 0.5\n"  # no module makes its tensors on meta
        "    return net(**arguments)\n"
    )
    out, _ = run("mymodel:build", "--num-classes", "5", "--dilated-size", "7", *SMALL)
    assert 'load_converted("build-dcls7", trust_code=True)' in out
    sys.modules.pop("mymodel")
    model = load_converted("build-dcls7", trust_code=True)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_arguments_of_the_model_are_stored_and_rebuild_the_same_network():
    kwargs = ("--model-kwargs", "ls_init_value=0.5", "act_layer=relu")
    run(*kwargs, TINY, *SMALL, "--dilated-size", 9, "--output", "out")
    for model in (load_converted("out"), timm.create_model("local-dir:out", pretrained=True)):
        assert torch.all(model.stages[0].blocks[0].gamma == 0.5)
        assert isinstance(model.stages[0].blocks[0].mlp.act, nn.ReLU)
    run(TINY, "--plan", "out", "--output", "other", code=2)
    run(TINY, "--plan", "out", "--output", "other", *kwargs)
    _, err = run(TINY, "--model-kwargs", "pretrained_cfg=resnet18.yaml", code=2)
    assert "argument pretrained_cfg is not allowed" in err


def test_rules_commands():
    names = set(json.loads(run("rules", "list", "--json")[0])["rules"])
    assert names == {line.split()[0] for line in run("rules", "list")[0].splitlines()}
    Path("copy.yaml").write_text(run("rules", "show", "depthwise")[0])
    assert "valid, 1 rule" in run("rules", "check", "copy.yaml")[0]
    checked = json.loads(run("rules", "check", "copy.yaml", "--json")[0])
    assert checked["rules"] == ["depthwise"]
    assert json.loads(run("rules", "schema")[0])["title"] == "RuleSet"
