"""The command line as its user meets it."""

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import timm
import torch

import dcls_convert
from dcls_convert.checkpoints.folder import FILES
from dcls_convert.cli.app import main

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
    for step in ("planning", "building", "converting", "measuring", f"writing {TINY}-dcls17"):
        assert f"{TINY}: {step}" in err
    snippet = re.search(r"Fine-tune it:\n\n(.*)", out, re.DOTALL)[1]
    names: dict[str, torch.nn.Module] = {}
    exec("\n".join(line[4:] for line in snippet.splitlines()), names)
    assert names["model"].num_classes == 10


@pytest.mark.parametrize(
    "arguments",
    [["convert", TINY, "--dilated-size", "9"], ["--dilated-size", "9", TINY], ["convert", "--dilated-size", "9", TINY]],
)
def test_convert_is_the_default_command(capsys, arguments):
    run(*arguments)
    assert Path(f"{TINY}-dcls9", "config.json").is_file()


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


def test_help_lists_what_there_is(capsys):
    run("--help")
    out = capsys.readouterr().out
    assert "convert" in out
    assert "rules" in out
    run("convert", "--help")
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--dilated-size", "--kernel-count", "--budget", "--scope", "--tie", "--interpolation", "--rules"} <= options
    assert {"--pretrained", "--checkpoint", "--init", "--num-classes", "--in-chans", "--input-size"} <= options
    assert {"--seed", "--output", "--force", "--dry-run", "--json", "--quiet", "--strict", "--verbose"} <= options


def test_a_bug_is_one_line_and_exit_code_1(capsys, monkeypatch):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("dcls_convert.cli.convert.plan_conversion", broken)
    run(TINY, code=1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: this is a bug in dcls-convert: ZeroDivisionError: oh no")


def test_process_with_warnings_as_errors_in_a_pipe_gives_the_same_bytes():
    """Python -W error, stdout and stderr piped; and equal bytes from another process."""
    run(TINY, "--quiet", "--output", "here")
    arguments = [sys.executable, "-W", "error", *THIRD_PARTY, "-m", "dcls_convert", TINY, "--output", "there"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert all(line.startswith(f"{TINY}: ") for line in done.stderr.splitlines()), done.stderr
    for file in FILES:
        assert Path("here", file).read_bytes() == Path("there", file).read_bytes(), file


THIRD_PARTY: list[str] = []  # -W ignore:... options for warnings of other packages; none are needed


def test_console_script_answers_without_torch():
    code = "import sys; sys.argv = ['dcls-convert', '--version']; from dcls_convert.cli.app import main; main()"
    check = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"dcls-convert {dcls_convert.__version__}", "False"]
    assert subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.startswith(
        "dcls-convert"
    )


def test_closed_pipe_is_no_traceback():
    done = subprocess.run(f"{PROGRAM} {TINY} --dry-run --verbose | head -1", shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


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
