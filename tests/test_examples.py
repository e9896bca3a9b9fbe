"""Examples do what they say: finetune.py (also killed, and in several processes)
and receptive_field.py. compare.py has a file of its own. Mistakes are one line each.
"""

import importlib
import os
import re
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

import dcls_convert
from dcls_convert.tuning import read_track

from .digits import write_digits

# Images stay open until they are collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.usefixtures("empty_folder"),
]
EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
OPTIONS = "--data digits --input-size 3 32 32 --batch-size 8"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs an example, and returns what it printed."""

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def convert(model, folder):
    report = dcls_convert.convert_(model, dilated_size=9, init="random")
    dcls_convert.save_converted(model, report.plan, folder)


def numbers_of(run):
    """Return all tensors and numbers of the state of a run."""
    leaves = tree_leaves(torch.load(f"{run}/state.pt", weights_only=True))
    return [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | float)]


SHARDED = "-m torch.distributed.run --standalone --nproc-per-node 2"


@pytest.mark.parametrize(
    ("launch", "more", "atol"),
    [
        pytest.param("", "--mixed-precision bf16", 0.0, marks=pytest.mark.processes),
        # Adam divides by roots of small gradients, which amplifies rounding.
        pytest.param(SHARDED, "--fsdp", 1e-3, marks=pytest.mark.distributed),
    ],
)
def test_a_killed_run_that_is_started_again_ends_like_an_uninterrupted_one(launch, more, atol):
    # One core for each process, and no GPU even if there is one.
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | environment | {"PYTHONPATH": str(EXAMPLES.parent)}
    write_digits(Path("digits"))
    convert(timm.create_model("test_convnext"), "converted")
    options = f"converted {OPTIONS} --epochs 3 --ema 0.9 {more} --output".split()
    command = [sys.executable, *launch.split(), str(EXAMPLES / "finetune.py"), *options]
    with subprocess.Popen([*command, "killed"], env=environment) as process:
        while not Path("killed/state.pt").exists():
            assert process.poll() is None
            time.sleep(0.01)
        if launch:
            process.terminate()  # torchrun ends its processes
        else:
            process.kill()
    assert len(torch.load("killed/state.pt", weights_only=True)["history"]) < 3
    for output in ("killed", "whole"):
        subprocess.run([*command, output], env=environment, check=True, timeout=600)
    torch.testing.assert_close(numbers_of("killed"), numbers_of("whole"), rtol=0, atol=atol)
    records = read_track("killed/positions.jsonl")
    assert [record.step for record in records] == [0, 1, 2, 3]
    blocks = timm.create_model("local-dir:killed/best", pretrained=True).stages[2].blocks
    assert blocks[0].conv_dw.positions is blocks[1].conv_dw.positions


def test_a_run_is_not_resumed_as_another(run):
    write_digits(Path("digits"))
    options = [*OPTIONS.split(), "--epochs", "1"]
    with pytest.raises(SystemExit, match=r"^error: test_convnexx: is neither a folder nor a"):
        run("finetune.py", "test_convnexx", *options)
    with pytest.raises(SystemExit, match=r"^error: --data digits/0: all images are of one class"):
        run("finetune.py", "test_convnext", *options, "--data", "digits/0")
    run("finetune.py", "test_convnext", *options)  # without DCLS layers
    state = Path("runs/test_convnext/state.pt").read_bytes()
    with pytest.raises(SystemExit, match=r"holds a run with lr 0\.001, not 1\.0; use another"):
        run("finetune.py", "test_convnext", *options, "--lr", "1")
    assert Path("runs/test_convnext/state.pt").read_bytes() == state


def test_a_folder_is_the_same_model_by_whatever_path(run):
    write_digits(Path("digits"))
    convert(timm.create_model("test_convnext"), "converted")
    options = [*OPTIONS.split(), "--epochs", "1", "--output", "run"]
    assert "run: epoch 1, " in run("finetune.py", "converted/", *options)
    same = ("./converted", Path("converted").resolve(), "local-dir:converted")
    for name in same:
        assert "run: epoch" not in run("finetune.py", name, *options)  # nothing left to train
    convert(timm.create_model("test_convnext"), "other/converted")
    with pytest.raises(SystemExit, match=r"holds a run with model .*, not .*other/converted; use"):
        run("finetune.py", "other/converted", *options)


def test_the_best_epoch_is_tested_on_images_that_did_not_choose_it(run):
    write_digits(Path("digits/train"))
    write_digits(Path("digits/val"), images=3)
    arguments = ["test_convnext", *OPTIONS.split(), "--epochs", "1", "--output", "run"]
    assert "%; optimistic, because the held-out images chose it\n" in run("finetune.py", *arguments)
    write_digits(Path("digits/test"), images=3)
    (Path("digits/test/3/one_more.png")).write_bytes(Path("digits/test/3/000.png").read_bytes())
    weights = load_file("run/best/model.safetensors")
    for label, images in ((2, 3), (3, 4)):
        weights["head.fc.weight"].zero_()
        weights["head.fc.bias"].copy_(torch.eye(4)[label])  # all images are of this class
        save_file(weights, "run/best/model.safetensors", metadata={"format": "pt"})
        printed = run("finetune.py", *arguments)
        assert "40 images to train, 12 held out, 13 to test" in printed
        accuracy = f"{100 * images / 13:.2f} % of the images in digits/test"
        assert printed.endswith(f"run/best: epoch 1, {accuracy}\n")


@pytest.mark.parametrize(
    ("input_size", "line"),
    [
        (
            None,
            "32x32 images are resized to 160x160, 25 times the work (--input-size 3 32 32 keeps",
        ),
        ([3, 48, 48], None),
        ([3, 16, 16], "32x32 images are resized to 16x16 (--input-size sets another size)"),
    ],
)
def test_resizing_by_much_is_said(input_size, line):
    finetune = importlib.import_module("finetune")
    write_digits(Path("digits"))
    model = timm.create_model("test_resnet", num_classes=4)
    printed = []
    accelerator = types.SimpleNamespace(is_main_process=True, print=printed.append)
    options = types.SimpleNamespace(input_size=input_size)
    finetune.check_images(finetune.read_images(Path("digits")), [model], options, accelerator)
    assert [text[: len(line)] for text in printed] == ([line] if line else [])


def test_progress_is_shown_on_a_terminal_alone(run, capsys, monkeypatch):
    write_digits(Path("digits"))
    options = ["test_convnext", *OPTIONS.split(), "--epochs", "1", "--output"]
    monkeypatch.setenv("TERM", "xterm")
    for output, is_terminal in (("file", False), ("terminal", True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
        with monkeypatch.context() as context:
            context.setattr(sys, "argv", ["finetune.py", *options, output])
            runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")
        shown = capsys.readouterr().err
        assert ("epoch 1 " in shown) if is_terminal else (shown == "")


@pytest.mark.parametrize("script", ["finetune", "compare"])
def test_help_shows_every_default(script, monkeypatch, capsys):
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, "model", "--data", "folder"])
    defaults = vars(module.parse_arguments())
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        module.parse_arguments()
    description, _, text = capsys.readouterr().out.partition("\noptions:\n")
    assert module.__doc__ in description
    sections = {}
    for section in re.split(r"\n  (?=-)", text):
        words = section.split()
        sections[words[0].removeprefix("--").replace("-", "_")] = " ".join(words)
    for name, value in defaults.items():
        if isinstance(value, int | float | str) and value is not False and name != "model":
            assert f"default: {value}" in sections[name]
        elif value is not False and name not in ("model", "data"):
            assert "default: " in sections[name]


def test_sizes_have_three_forms_and_a_quoted_home_is_expanded(monkeypatch):
    finetune = importlib.import_module("finetune")
    monkeypatch.setenv("HOME", str(Path.cwd()))
    command = "finetune.py ~/model --data ~/images --output ~/run --input-size"
    for size in ("3 48 64", "3x48x64", "48x64"):
        monkeypatch.setattr(sys, "argv", f"{command} {size}".split())
        options = finetune.parse_arguments()
        assert options.input_size == [3, 48, 64]
        found = (options.model, options.data, options.output)
        assert [*map(str, found)] == [str(Path.cwd() / name) for name in ("model", "images", "run")]


FINETUNE = "finetune.py test_convnext --data digits "
COMPARE = "compare.py test_convnext --data digits "


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (FINETUNE + "--lr nan", "argument --lr: nan is not from 0 to"),
        (FINETUNE + "--hflip 2", "argument --hflip: 2 is not from 0 to 1"),
        (FINETUNE + "--workers -1", "argument --workers: -1 is not from 0 to"),
        (FINETUNE + "--epochs 1.5", "argument --epochs: invalid int value: '1.5'"),
        (FINETUNE + "--seed -1", "argument --seed: -1 is not from 0 to"),
        (FINETUNE + "--input-size 3 32", "argument --input-size: 3 32: must be channels, rows and"),
        (FINETUNE + "--input-size 1 32 32", "--input-size: 1x32x32 does not fit the model: "),
        (FINETUNE + "--model-kwargs foo", "argument --model-kwargs: foo: must be KEY=VALUE"),
        (FINETUNE + "--model-kwargs foo=1", "test_convnext: .*unexpected keyword argument 'foo'"),
        (FINETUNE + "--model-kwargs num_classes=2", "the model has 2 outputs, but there are 4"),
        (FINETUNE + "--batch-size 99", "--data: only 32 images to train, 8 held out"),
        (FINETUNE + "--output text", ".*File exists: 'text'"),
        (FINETUNE + "--fsdp", "--fsdp: .* start it with torchrun"),
        (FINETUNE + "--data nothing", "--data nothing: Found 0 images"),
        (FINETUNE + "--data damaged", "--data: 2 files cannot be read as images: damaged/0/"),
        (FINETUNE + "--data deep", "--data: 1 files have more than 8 bits per channel .*deep/1/"),
        (COMPARE + "--sizes 9 --data deep", "--data: 1 files have more than 8 bits per channel "),
        (COMPARE + "--sizes 9-kernel-uniform", "--sizes 9-kernel-uniform: these words exclude"),
        (COMPARE + "--sizes 9 --input-size 1x32x32", "--input-size: 1x32x32 does not fit"),
        ("compare.py local-dir:digits --data digits", "digits: is a folder; give a name"),
        ("timm_train.py digits/train.py", "digits/train.py: is not a file; train.py is in timm"),
        ("timm_train.py text --model digits", "--model digits: .* write --model local-dir:digits"),
        (
            "timm_train.py text --model=local-dir:no",
            "--model local-dir:no: there is no such folder",
        ),
        ("receptive_field.py no_model", r"no_model: Unknown model \(no_model\)"),
        ("receptive_field.py test_convnext --layer no", "layer no, images of 3x160x160: .*no"),
        (
            "receptive_field.py test_resnet --layer layer1 --input-size 3x9",
            "--input-size 3x9: must",
        ),
    ],
)
def test_a_mistake_is_one_line(run, command, message, capsys):
    write_digits(Path("digits"))
    write_digits(Path("damaged"))
    Path("damaged/0/000.png").write_text("<html>")
    whole = Path("damaged/0/001.png").read_bytes()
    Path("damaged/0/001.png").write_bytes(whole[: len(whole) // 2])
    write_digits(Path("deep"))
    Image.new("I;16", (32, 32), 40_000).save("deep/1/000.png")
    Path("nothing/0").mkdir(parents=True)
    Path("text").touch()
    with pytest.raises(SystemExit) as ended:
        run(*command.split())
    line = ended.value.code
    if line == 2:  # argparse's
        line = capsys.readouterr().err.splitlines()[-1].partition(": ")[2]
    assert re.match(f"error: {message}", line)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("script", "package", "extra"),
    [
        ("finetune.py", "accelerate", "train"),
        ("compare.py", "scipy", "train"),
        ("receptive_field.py", "matplotlib", "plot"),
    ],
)
def test_a_missing_extra_is_named(run, script, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"^error: .*{package}.*: pip install '\.\[{extra}\]'$"):
        run(script, "test_convnext", "--data", "digits")


def test_the_receptive_field_of_one_convolution_is_its_kernel():
    functions = runpy.run_path(str(EXAMPLES / "receptive_field.py"))
    conv = torch.nn.Conv2d(1, 1, (5, 3), dilation=(2, 1), padding="same", bias=False)
    torch.nn.init.constant_(conv.weight, -0.5)
    images = list(torch.randn(2, 1, 21, 15, generator=torch.Generator().manual_seed(0)))
    field = functions["receptive_field"](torch.nn.Sequential(conv), "0", images)
    expected = torch.zeros(21, 15, dtype=torch.float64)
    expected[6:15:2, 6:9] = 0.5
    assert torch.equal(field, expected)
