"""Examples do what they say: first_steps.py, and finetune.py in one process, with options that fit
and options that do not.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import dcls_convert
from dcls_convert.checkpoints.verify import check_model_in_this_process, verify_folder
from dcls_convert.tuning import read_track

from .image_folder import write_images

# timm leaves images open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--img-size", "32", "--batch-size", "4", "--epochs", "2"]


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
def finetune(monkeypatch, tmp_path):
    def run(*arguments, pictures=False):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["finetune.py", *map(str, arguments)])
            if not pictures:
                patched.setitem(sys.modules, "matplotlib", None)
            runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")

    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def refused(finetune, capsys):
    def run(*arguments, says, code=2):
        with pytest.raises(SystemExit) as stopped:
            finetune(*arguments)
        assert stopped.value.code == code
        error = capsys.readouterr().err.splitlines()
        assert says in error[-1]
        assert len(error) == 1 + error[0].startswith("usage: ")

    return run


@pytest.fixture
def images(tmp_path):
    write_images(tmp_path / "images")
    return tmp_path / "images"


@pytest.mark.slow
def test_a_folder_of_images(finetune, images, capsys):
    name = "test_efficientnet"
    options = ["--data", images, *SMALL]
    more = ["--repulsive", "1", "--augmentation", "strong", "--lr", "0.003"]
    finetune(name, "--dilated-size", "7", *options, *more, pictures=True)
    run = Path("runs") / name
    assert "best accuracy" in capsys.readouterr().out
    history = json.loads((run / "history.json").read_text())
    assert [len(history["loss"]), len(history["accuracy"])] == [8, 2]
    assert [record.step for record in read_track(run / "positions.jsonl")] == [1, 2]
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert verify_folder(run / "best", check_model=check_model_in_this_process).ok
    finetune(run / "best", *options, "--epochs", "1", "--output", "again")
    assert timm.create_model("local-dir:again/best", pretrained=True).num_classes == 2


@pytest.mark.slow
def test_batches_in_several_parts_are_the_same_update(finetune, images):
    options = ["--data", images, "--dilated-size", "7", "--img-size", "32", "--epochs", "1"]
    finetune("test_convnext", *options, "--batch-size", "8", "--output", "whole")
    finetune(
        "test_convnext",
        *options,
        "--batch-size",
        "4",
        "--accumulate",
        "2",
        "--workers",
        "1",
        "--output",
        "parts",
    )
    whole, parts = (torch.load(f"{run}/state.pt", weights_only=True) for run in ("whole", "parts"))
    assert whole["update"] == parts["update"] == 2
    for name, tensor in whole["model"].items():
        # float32 sums are in another order.
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=2e-4)


# Learning from a teacher.


@pytest.fixture
def unlabelled(tmp_path):
    """Write a folder of images without classes, some of them in a subfolder."""
    for index in range(20):
        path = tmp_path / "unlabelled" / ("deeper" if index % 2 else ".") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((5, 5), 30 + 5 * index).convert("RGB").resize((40, 40)).save(path)
    return tmp_path / "unlabelled"


def converted(model, folder, **options):
    report = dcls_convert.convert_(model, dilated_size=9, **options)
    return dcls_convert.save_converted(model, report.plan, folder)


@pytest.mark.slow
def test_a_converted_network_comes_closer_to_its_teacher(finetune, unlabelled, tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=100)
    with torch.no_grad():
        model.head.fc.weight.mul_(20)
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):  # so that outputs depend on the blocks
                parameter.fill_(1)
    save_file(model.state_dict(), tmp_path / "teacher.safetensors")
    named = ["--teacher", "test_convnext", "--teacher-checkpoint", "teacher.safetensors"]
    folder = converted(model, tmp_path / "student", budget=40, init="random")
    options = ["--data", unlabelled, *SMALL, "--epochs", "3", "--lr", "0.0001"]
    finetune(folder, *named, *options, "--output", "run")
    history = json.loads(Path("run/history.json").read_text())
    assert np.mean(history["loss"][-4:]) < 0.9 * np.mean(history["loss"][:4])
    # 4 updates in each of 3 epochs: 4 of the 20 images are held out.
    assert [len(history["loss"]), len(history["agreement"])] == [12, 3]
    assert "before: agreement" in capsys.readouterr().out
    assert timm.create_model("local-dir:run/best", pretrained=True).num_classes == 100


@pytest.mark.slow
def test_frozen_statistics_stay(finetune, unlabelled, tmp_path):
    model = timm.create_model("test_resnet")
    save_file(model.state_dict(), tmp_path / "teacher.safetensors")
    named = [
        "--teacher",
        "test_resnet",
        "--teacher-checkpoint",
        "teacher.safetensors",
        "--data",
        unlabelled,
    ]
    folder = converted(model, tmp_path / "student", budget=60)
    for options in ([], ["--freeze-statistics"]):
        finetune(folder, *named, *options, *SMALL, "--output", "".join(["run", *options]))
    free, frozen = (
        load_file(f"run{option}/best/model.safetensors") for option in ("", "--freeze-statistics")
    )
    statistics = [name for name in free if name.endswith("running_mean")]
    assert all(
        torch.equal(frozen[name], tensor)
        for name, tensor in model.state_dict().items()
        if name in statistics
    )
    assert any(not torch.equal(free[name], frozen[name]) for name in statistics)


def test_a_teacher_that_does_not_fit_is_refused(refused, unlabelled, tmp_path):
    for name, overlay, classes in [("other", {"mean": (0.1, 0.2, 0.3)}, 1000), ("fewer", {}, 7)]:
        model = timm.create_model(
            "test_convnext", num_classes=classes, pretrained_cfg_overlay=overlay
        )
        timm.models.save_for_hf(model, tmp_path / name, safe_serialization=True)
    for name, says in [
        ("other", "takes images with another mean and std"),
        ("fewer", "has 7 classes"),
    ]:
        refused("test_convnext", "--teacher", name, "--data", unlabelled, *SMALL, says=says)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere: neither a folder nor a model of timm"),
        (["test_vit", "--dilated-size", "9"], 3, "nothing in the model matches"),
        (
            ["test_convnext", "--mixup", "1", "--batch-size", "3"],
            2,
            "batch size 3: mixup and cutmix need an even one",
        ),
        (
            ["test_convnext", "--teacher", "test_vit"],
            2,
            "--teacher test_vit: cannot load its weights",
        ),
        (
            ["test_convnext", "--teacher", "test_vit", "--num-classes", "3"],
            2,
            "keeps the classes that it has",
        ),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing_behind(
    refused, tmp_path, arguments, code, message
):
    refused(*arguments, says=message, code=code)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_neither_overwritten_nor_resumed_as_another(finetune, refused, images, capsys):
    options = ["test_convnext", "--data", images, *SMALL, "--epochs", "1"]
    finetune(*options)  # without DCLS layers
    assert timm.create_model("local-dir:runs/test_convnext/best", pretrained=True).num_classes == 2
    capsys.readouterr()
    state = Path("runs/test_convnext/state.pt").read_bytes()
    refused(*options, says="holds a run already")
    refused(*options, "--resume", "--lr", "1", says="was written with lr 0.001, not 1.0")
    assert Path("runs/test_convnext/state.pt").read_bytes() == state
    Path("runs/test_convnext/state.pt").write_bytes(state[:1000])
    refused(*options, "--resume", says="state.pt: is damaged")
