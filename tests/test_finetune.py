"""examples/finetune.py in one process: on a folder of images, and where what it is given does not fit."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.tuning import read_track

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm leaves images open
EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--img-size", "32", "--batch-size", "4", "--epochs", "2"]


@pytest.fixture
def finetune(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return run


@pytest.fixture
def images(tmp_path):
    """Two classes that brightness tells apart."""
    generator = np.random.default_rng(0)
    for split, count in [("train", 8), ("validation", 3)]:
        for label, brightness in [("dark", 0), ("light", 200)]:
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(brightness, brightness + 50, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet"])
def test_a_folder_of_images(finetune, images, capsys, name):
    options = ["--data", images, *SMALL]
    finetune(name, "--dilated-size", "7", *options, "--repulsive", "1", "--aa", "rand-m3", "--lr", "0.003")
    run = Path("runs") / name
    assert "best accuracy" in capsys.readouterr().out
    history = json.loads((run / "history.json").read_text())
    assert [len(history["loss"]), len(history["accuracy"])] == [8, 2]
    assert [record.step for record in read_track(run / "positions.jsonl")] == [1, 2]
    assert all((run / picture).read_bytes().startswith(b"\x89PNG") for picture in ("training.png", "positions.png"))
    assert verify_folder(run / "best", rebuild=rebuild_here).ok
    finetune(run / "best", *options, "--output", "again")
    assert timm.create_model("local-dir:again/best", pretrained=True).num_classes == 2


def test_a_model_without_dcls_layers(finetune, images):
    finetune("test_convnext", "--data", images, *SMALL, "--ema", "0", "--clip-grad", "0")
    assert timm.create_model("local-dir:runs/test_convnext/best", pretrained=True).num_classes == 2
    assert not Path("runs/test_convnext/positions.png").exists()


def test_batches_in_several_parts_are_the_same_update(finetune, images):
    options = ["--data", images, "--dilated-size", "7", "--img-size", "32", "--epochs", "1"]
    finetune("test_convnext", *options, "--batch-size", "8", "--output", "whole")
    finetune("test_convnext", *options, "--batch-size", "4", "--accumulate", "2", "--workers", "1", "--output", "parts")
    whole, parts = (torch.load(f"{run}/state.pt", weights_only=True) for run in ("whole", "parts"))
    assert whole["update"] == parts["update"] == 2
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=2e-4)  # float32, other sums


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere: neither a folder nor a model of timm"),
        (["test_convnext", "--data", "nowhere"], 2, "--data nowhere: is not a folder"),
        (["test_convnext", "--data", "."], 2, "--data .: "),
        (["test_convnext", "--dataset", "nonesuch/x", "--data", "."], 2, "--data .: "),
        (["test_convnext", "--batch-size", "4096"], 2, "one update takes more than all 1437 images"),
        (["test_convnext", "--fsdp"], 2, "--fsdp: needs several processes"),
        (["test_convnext", "--dilated-size", "8"], 2, "window 8"),
        (["test_vit", "--dilated-size", "9"], 3, "nothing in the model matches"),
        (["test_convnext", "--epochs", "0"], 2, "--epochs must be at least 1, not 0"),
        (["test_convnext", "--mixup", "1", "--batch-size", "3"], 2, "even --batch-size"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing_behind(finetune, tmp_path, capsys, arguments, code, message):
    with pytest.raises(SystemExit) as stopped:
        finetune(*arguments)
    assert stopped.value.code == code
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert len(error) == 1 + error[0].startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_neither_overwritten_nor_resumed_as_another(finetune, images, capsys):
    options = ["test_convnext", "--data", images, *SMALL]
    finetune(*options)
    state = Path("runs/test_convnext/state.pt").read_bytes()

    def refused(*more, says):
        with pytest.raises(SystemExit) as stopped:
            finetune(*options, *more)
        assert stopped.value.code == 2
        assert says in capsys.readouterr().err

    refused(says="holds a run already")
    refused("--resume", "--lr", "1", says="was written with lr 0.001, not 1.0")
    assert Path("runs/test_convnext/state.pt").read_bytes() == state
    Path("runs/test_convnext/state.pt").write_bytes(state[:1000])
    refused("--resume", says="state.pt: cannot be read")
