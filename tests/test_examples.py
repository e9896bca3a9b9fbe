"""Examples do what they say: first_steps.py, and finetune.py in one and in several processes,
killed, and with options that do not fit.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils._pytree import tree_flatten_with_path

import dcls_convert
from dcls_convert.tuning import read_track

from .digits import write_digits

# Images stay open until they are collected.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
EXAMPLES = Path(__file__).parent.parent / "examples"
FINETUNE = EXAMPLES / "finetune.py"
OPTIONS = "--data digits --input-size 3 32 32 --batch-size 8"
# One core for each process, and no GPU even if there is one.
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(EXAMPLES.parent),
}


def test_first_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["first_steps.py"])
    runpy.run_path(str(EXAMPLES / "first_steps.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "loaded by timm, outputs equal: True" in out


# finetune.py.


@pytest.fixture
def folder(monkeypatch, tmp_path):
    write_digits(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finetune(monkeypatch, folder):
    def run(*arguments):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
            runpy.run_path(str(FINETUNE), run_name="__main__")

    return run


def converted(model, folder, **options):
    report = dcls_convert.convert_(model, dilated_size=9, **options)
    return dcls_convert.save_converted(model, report.plan, folder)


@pytest.mark.slow
def test_it_trains_on_digits_and_what_it_writes_can_be_trained_again(finetune, tmp_path):
    write_digits(tmp_path / "all", classes=10, images=150)
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=10, ls_init_value=0.1)
    folder = converted(model, tmp_path / "converted", init="random")
    options = "--data all --input-size 3 32 32 --epochs 2 --augmentation none --hflip 0 --lr 0.003"
    finetune(folder, *options.split(), "--output", "run")
    history = json.loads(Path("run/history.json").read_text())
    assert history[1]["accuracy"] > 60
    assert history[1]["loss"] < history[0]["loss"]
    records = read_track("run/positions.jsonl")
    assert [record.step for record in records] == [0, 1, 2]
    assert all(row.speed > 0 for row in records[2].positions.values())
    more = ["--ema", "0.9", "--repulsive", "1"]
    finetune("run/best", *OPTIONS.split(), "--epochs", "1", "--output", "again", *more)
    assert timm.create_model("local-dir:again/best", pretrained=True).num_classes == 4


def test_hidden_files_are_no_data(folder):
    digits = folder / "digits"
    copies = digits / ".ipynb_checkpoints"
    copies.mkdir()
    (digits / "0" / ".cache").mkdir()
    (digits / "@eaDir").mkdir()
    for target in (
        digits / "@eaDir" / "0.png",
        copies / "0.png",
        digits / "0" / ".cache" / "0.png",
        digits / "0" / "._0.png",
    ):
        target.write_bytes((digits / "0" / "000.png").read_bytes())
    read_images = runpy.run_path(str(FINETUNE))["read_images"]
    train, test = read_images(digits)
    assert (len(train), len(test)) == (32, 8)
    assert train.reader.class_to_idx == {"0": 0, "1": 1, "2": 2, "3": 3}
    for path, label in train.reader.samples + test.reader.samples:
        assert Path(path).parent.name == str(label)
    (folder / "split" / "val").mkdir(parents=True)
    digits.rename(folder / "split" / "train")
    for label in "0123":
        (folder / "split" / "val" / label).mkdir()
        moved = f"{label}/000.png"
        (folder / "split" / "train" / moved).rename(folder / "split" / "val" / moved)
    train, test = read_images(folder / "split")
    assert (len(train), len(test)) == (36, 4)
    (folder / "split" / "val" / "0").rename(folder / "split" / "val" / "zero")
    with pytest.raises(dcls_convert.DclsConvertError, match="have different class folders"):
        read_images(folder / "split")


# Killed, and in several processes.


def assert_equal_states(first, second, atol=0.0):
    """Compare two files of states, leaf by leaf."""
    states = [torch.load(run / "state.pt", weights_only=True) for run in (first, second)]
    for state in states:
        del state["settings"]
    leaves = [tree_flatten_with_path(state)[0] for state in states]
    for (path, leaf), (other_path, other) in zip(*leaves, strict=True):
        assert path == other_path
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            torch.testing.assert_close(leaf, other, rtol=0, atol=atol)
        elif isinstance(leaf, float):
            assert leaf == pytest.approx(other, abs=atol)
        else:
            assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other


KILLED = f"converted --model-kwargs drop_path_rate=0.2 {OPTIONS} --epochs 3 --ema 0.9"


@pytest.mark.processes
def test_a_killed_run_that_is_started_again_ends_like_an_uninterrupted_one(folder):
    converted(timm.create_model("test_convnext"), folder / "converted", init="random")
    options = [*KILLED.split(), "--mixed-precision", "bf16"]
    command = [sys.executable, FINETUNE, *options, "--output"]
    state = folder / "killed" / "state.pt"
    with subprocess.Popen([*command, "killed"], env=ENVIRONMENT) as process:
        while not state.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    epochs = len(torch.load(state, weights_only=True)["history"])
    assert epochs < 3
    done = subprocess.run([*command, "killed"], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.startswith(f"killed: epoch {epochs + 1}, ")
    subprocess.run([*command, "whole"], env=ENVIRONMENT, check=True)
    assert_equal_states(folder / "killed", folder / "whole")
    for run in ("killed", "whole"):
        records = read_track(folder / run / "positions.jsonl")
        assert [record.step for record in records] == [0, 1, 2, 3]
        assert all(row.speed is not None for row in records[-1].positions.values())
    weights = [
        load_file(folder / run / "best" / "model.safetensors") for run in ("killed", "whole")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.distributed
def test_two_processes_train_alike_with_shards_and_killed_or_not(folder):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    converted(timm.create_model("test_convnext"), folder / "converted", init="random")
    options = [*KILLED.replace("0.2", "0").split(), "--augmentation", "none"]
    command = [*launch, FINETUNE, *options, "--epochs", "2", "--output"]
    subprocess.run([*command, "whole"], env=ENVIRONMENT, check=True, timeout=600)
    sharded = [*command, "sharded", "--fsdp"]
    with subprocess.Popen(sharded, env=ENVIRONMENT) as process:
        while not (folder / "sharded" / "state.pt").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()  # torchrun ends its processes
    subprocess.run(sharded, env=ENVIRONMENT, check=True, timeout=600)
    # Adam divides by roots of small gradients, which amplifies rounding.
    assert_equal_states(folder / "whole", folder / "sharded", atol=1e-3)
    records = read_track(folder / "sharded" / "positions.jsonl")
    assert [record.step for record in records] == [0, 1, 2]
    blocks = timm.create_model("local-dir:sharded/best", pretrained=True).stages[2].blocks
    assert blocks[0].conv_dw.positions is blocks[1].conv_dw.positions


# Learning from a teacher.


@pytest.fixture
def unlabelled(folder):
    """Write a folder of images without classes, some of them in a subfolder."""
    for index in range(20):
        path = folder / "unlabelled" / ("deeper" if index % 2 else ".") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((5, 5), 30 + 5 * index).convert("RGB").resize((40, 40)).save(path)
    return folder / "unlabelled"


@pytest.mark.slow
def test_a_converted_network_comes_closer_to_its_teacher(finetune, unlabelled, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=100, ls_init_value=1.0)
    with torch.no_grad():
        model.head.fc.weight.mul_(20)
    timm.models.save_for_hf(model, tmp_path / "teacher", safe_serialization=True)
    student = converted(model, tmp_path / "student", budget=40, init="random")
    options = "--teacher teacher --data unlabelled --input-size 3 32 32 --batch-size 4"
    finetune(student, *options.split(), "--epochs", "3", "--lr", "0.0001", "--output", "run")
    losses = [epoch["loss"] for epoch in json.loads(Path("run/history.json").read_text())]
    assert losses[-1] < 0.9 * losses[0]
    assert timm.create_model("local-dir:run/best", pretrained=True).num_classes == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("test_convnext --data nowhere", "--data nowhere: is not a folder"),
        (f"test_convnext {OPTIONS} --batch-size 99", "only 32 images to train, 8 to test; each"),
        (f"test_convnext {OPTIONS} --input-size 32 32 3", "--input-size: the first number is that"),
        (f"test_convnexx {OPTIONS}", "test_convnexx: Unknown model"),
        (f"nowhere/model {OPTIONS}", "nowhere/model: "),
        (f"digits {OPTIONS}", "digits: "),
        (f"test_convnext {OPTIONS} --teacher test_convnexx", "test_convnexx: Unknown model"),
        (f"folded {OPTIONS}", "folded: is no converted folder, or is folded"),
    ],
)
def test_mistakes_are_told_in_one_line(finetune, arguments, message):
    model = timm.create_model("test_convnext", num_classes=4, kernel_sizes=9)  # as folded for timm
    timm.models.save_for_hf(model, "folded", model_args={"kernel_sizes": 9})
    with pytest.raises(SystemExit) as stopped:
        finetune(*arguments.split())
    assert str(stopped.value).startswith("error: ")
    assert str(stopped.value).isprintable()
    assert message in str(stopped.value)
    assert not Path("runs").exists() or not [*Path("runs").rglob("*.jsonl")]


def test_a_run_is_not_resumed_as_another(finetune):
    options = ["test_convnext", *OPTIONS.split(), "--epochs", "1"]
    finetune(*options)  # without DCLS layers
    assert timm.create_model("local-dir:runs/test_convnext/best", pretrained=True).num_classes == 4
    state = Path("runs/test_convnext/state.pt").read_bytes()
    with pytest.raises(SystemExit, match=r"holds a run with lr 0\.001, not 1\.0; use another"):
        finetune(*options, "--lr", "1")
    with pytest.raises(
        SystemExit, match=r"epochs 1, not 2; .* can go on from runs/test_convnext/best"
    ):
        finetune(*options, "--epochs", "2")
    assert Path("runs/test_convnext/state.pt").read_bytes() == state


# receptive_field.py.


@pytest.fixture
def functions():
    return runpy.run_path(str(EXAMPLES / "receptive_field.py"))


def test_the_field_of_one_convolution_is_its_kernel(functions):
    conv = torch.nn.Conv2d(1, 1, (5, 3), dilation=(2, 1), padding="same", bias=False)
    torch.nn.init.constant_(conv.weight, -0.5)
    images = list(torch.randn(2, 1, 21, 15, generator=torch.Generator().manual_seed(0)))
    field = functions["receptive_field"](torch.nn.Sequential(conv), "0", images)
    expected = torch.zeros(21, 15, dtype=torch.float64)
    expected[6:15:2, 6:9] = 0.5
    assert torch.equal(field, expected)


@pytest.mark.parametrize(("side", "square"), [(9, 1), (9, 5), (10, 2), (10, 6)])
def test_the_central_square_has_the_smallest_sufficient_side(functions, side, square):
    field = torch.zeros(side, side, dtype=torch.float64)
    first = (side - square) // 2
    field[first : first + square, first : first + square] = 1.0
    assert functions["central_side"](field, 1.0) == square
    assert functions["central_side"](torch.ones(side, side, dtype=torch.float64), 1.0) == side


def test_receptive_fields_of_a_network_and_its_conversion_are_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    converted(timm.create_model("test_convnext"), "new", init="random")
    monkeypatch.setattr(sys, "argv", ["receptive_field.py", "test_convnext", "new"])
    runpy.run_path(str(EXAMPLES / "receptive_field.py"), run_name="__main__")
    assert "new: half of the gradient in the central" in capsys.readouterr().out
    assert Path("receptive-field.png").read_bytes().startswith(b"\x89PNG")
