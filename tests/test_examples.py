"""Examples do what they say: finetune.py (also killed, and in several processes)
and receptive_field.py. compare.py has a file of its own.
"""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
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


def test_the_receptive_field_of_one_convolution_is_its_kernel():
    functions = runpy.run_path(str(EXAMPLES / "receptive_field.py"))
    conv = torch.nn.Conv2d(1, 1, (5, 3), dilation=(2, 1), padding="same", bias=False)
    torch.nn.init.constant_(conv.weight, -0.5)
    images = list(torch.randn(2, 1, 21, 15, generator=torch.Generator().manual_seed(0)))
    field = functions["receptive_field"](torch.nn.Sequential(conv), "0", images)
    expected = torch.zeros(21, 15, dtype=torch.float64)
    expected[6:15:2, 6:9] = 0.5
    assert torch.equal(field, expected)
