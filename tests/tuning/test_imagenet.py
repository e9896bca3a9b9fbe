"""The commands of examples/imagenet.md run as written, with few images and small models."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import dcls_convert
from dcls_convert import tuning

from ..command_line import run

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "imagenet.md").read_text()
CONVERT, SLURM, TORCHRUN, CONVNEXT, RESNET = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
# The only changes to the commands of the page.
REPLACEMENTS = {
    "convnext_tiny": "test_convnext",
    "convnext_small": "test_convnext2",
    "convnext_base": "test_convnext3",
    "resnet50": "test_resnet",
    "--nodes 4": "--nodes 1",
    "--nnodes 4 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2",
    "$HEAD:29500": "127.0.0.1:0",
    "--workers 8 --pin-mem": "--workers 0 --device cpu",
    "--input-size 3 224 224": "--input-size 3 32 32",
    "--input-size 3 160 160": "--input-size 3 32 32",
    "--batch-size 128": "--batch-size 4",
    "--batch-size 64": "--batch-size 8",  # in one process
    "--warmup-epochs 20": "--warmup-epochs 1",
    "--warmup-epochs 5": "--warmup-epochs 1",
    "--repulsive-loss-from 21": "--repulsive-loss-from 1",
    "--epochs 280": "--epochs {convnext}",  # after one epoch of warmup
    "--epochs 100": "--epochs {resnet}",
}
IMAGES = 8  # training images: one batch over all processes, so that an epoch is one step
# Epochs without warmup. The first run has two steps in all, the resumed one four.
FIRST = {"convnext": 1, "resnet": 2}
RESUMED = {"convnext": 3, "resnet": 4}
# Stand-ins for the programs of a cluster.
STUBS = {
    "python": f'exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "sbatch": 'shift 2; exec bash "$@"',
    "srun": 'shift; exec "$@"',
    "scontrol": "echo 127.0.0.1",
}
# A torchrun that ignores its options: a single process starts in half the time.
SINGLE_PROCESS = 'while [[ $1 == --* ]]; do shift 2; done; exec python "$@"'
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_NODELIST": "node1",
}


def changed(block: str, epochs: dict[str, int]) -> str:
    assert all(text in PAGE for text in REPLACEMENTS)
    for text, replacement in REPLACEMENTS.items():
        block = block.replace(text, replacement.format(**epochs))
    return block


def array_and_commands(block: str) -> tuple[str, list[str]]:
    """Split a block into the array of options that the commands share, and the commands."""
    array, *commands = re.split(r"^(?=LAST=)", block, flags=re.M)
    return array, commands


def finished(folder: Path, script: str) -> str:
    """Run a bash script in the folder, and return what it prints."""
    environment = {
        **os.environ,
        **JOB,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["bash", "-euc", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, timeout=300, check=False, **pipes
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the files and programs that the page needs, images and converted models."""
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("imagenet.slurm", "timm_train.py"):
        shutil.copy(EXAMPLES / name, folder)
    script = Path(os.environ.get("TIMM_TRAIN_SCRIPT") or Path(__file__).with_name("small_train.py"))
    # DDP refuses device_ids for a model on the CPU.
    cpu_script = script.read_text().replace("device_ids=[device], ", "")
    (folder / "train.py").write_text(cpu_script)
    for name, line in STUBS.items():
        program(folder / "bin" / name, line)
    for split, images in (("train", IMAGES), ("val", 4)):
        for index in range(images):
            path = folder / "imagenet" / split / f"n{index % 2}" / f"{index}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((40, 36), 80 + index).convert("RGB").save(path)
    with contextlib.chdir(folder):
        for line in changed(CONVERT, FIRST).splitlines():
            run(*line.split()[1:])
    return folder


def program(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def runs(prepared):
    """The output and the last checkpoint of each run.

    ConvNeXt-T trains with SLURM for two steps, then for two more. ResNet-50 trains in one process.
    """
    program(prepared / "alone" / "torchrun", SINGLE_PROCESS)
    shared, (tiny, *_) = array_and_commands(CONVNEXT)
    convnext = SLURM + shared + tiny
    done = {}
    resnet = f"PATH=alone:$PATH\n{TORCHRUN}{RESNET}"
    blocks = {"first": (convnext, FIRST), "resumed": (convnext, RESUMED), "resnet": (resnet, FIRST)}
    for name, (block, epochs) in blocks.items():
        printed = finished(prepared, changed(block, epochs))
        experiment = "test_resnet" if name == "resnet" else "test_convnext"
        last = prepared / "output" / "train" / experiment / "last.pth.tar"
        done[name] = printed, torch.load(last, weights_only=False)
    return done


# run -> learning rate, weight decay, epochs done
RECIPES = {"first": (4e-3, 0.05, 2), "resumed": (4e-3, 0.05, 4), "resnet": (8e-3, 0.02, 2)}


@pytest.mark.parametrize("name", RECIPES)
def test_optimizer_settings_follow_the_recipe_and_resuming_continues(runs, name):
    lr, decay, epochs = RECIPES[name]
    printed, state = runs[name]
    groups = state["optimizer"]["param_groups"]
    settings = {
        (group["initial_lr"], group.get("lr_scale", 1), group["weight_decay"]) for group in groups
    }
    assert settings == {(lr, 1, decay), (lr, 1, 0), (lr, 5, 0)}
    (current_lr,) = {group["lr"] / group.get("lr_scale", 1) for group in groups}
    # ConvNeXt's schedule has ended at its minimum. ResNet's, stepped per epoch, is half way.
    assert current_lr == pytest.approx(1e-6 if name != "resnet" else (lr + 1e-6) / 2)
    assert list(map(int, re.findall(r"Train: (\d+) ", printed))) == [epochs - 2, epochs - 1]
    lines = re.findall(r"epoch (\d+): repulsive loss 0[\d.]+, (on|off)", printed)
    assert lines == [
        (str(epoch), "on" if epoch >= 1 else "off") for epoch in range(epochs - 2, epochs)
    ]


@pytest.mark.parametrize(
    ("names", "size"), [(("first", "resumed"), "convnext-dcls17"), (("resnet",), "resnet-dcls7")]
)
def test_positions_move_in_every_run_and_are_recorded(runs, prepared, names, size):
    states = [dcls_convert.load_converted(prepared / f"test_{size}").state_dict()]
    states += [runs[name][1]["state_dict"] for name in names]
    keys = [key for key in states[0] if "positions" in key]
    for before, after in itertools.pairwise(states):
        assert all(not torch.equal(before[key], after[key]) for key in keys)
    track = tuning.read_track(prepared / f"test_{size.partition('-')[0]}.jsonl")
    assert [record.step for record in track] == list(range(2 * len(names) + 1))


def test_the_average_loads_in_timm_and_becomes_a_folder(runs, prepared, tmp_path):
    folder = f"local-dir:{prepared / 'test_convnext-dcls17'}"
    last = prepared / "output" / "train" / "test_convnext" / "last.pth.tar"
    model = timm.create_model(folder, checkpoint_path=str(last))
    checkpoint = runs["resumed"][1]
    average = checkpoint["state_dict_ema"]
    assert all(torch.equal(tensor, average[key]) for key, tensor in model.state_dict().items())
    assert any(
        not torch.equal(tensor, checkpoint["state_dict"][key]) for key, tensor in average.items()
    )
    saved = dcls_convert.save_converted(
        model, prepared / "test_convnext-dcls17", tmp_path / "trained"
    )
    loaded = timm.create_model(f"local-dir:{saved}", pretrained=True)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
