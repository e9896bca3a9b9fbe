"""Training in several processes gives the same results as training in one.

A killed and resumed run of examples/finetune.py gives the same results as one that was not killed.
"""

import dataclasses
import functools
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from torch.utils._pytree import tree_flatten_with_path

import dcls_convert
from dcls_convert.tuning import read_track

from ..conftest import TINY
from ..image_folder import write_images
from .distributed_worker import CASES, converted, train

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
PROCESSES = 2
# Adam divides by roots of small gradients, which amplifies rounding errors of 1e-16.
FLOAT64_ATOL = 1e-9
# One core for each process, and no GPU even if there is one.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}


def start(folder: Path, *runs: str) -> list[subprocess.Popen]:
    """Start two processes, as torchrun does, that make these runs.

    One start makes several runs, since starting takes longest.
    """
    shared = {
        "WORLD_SIZE": PROCESSES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": random.randint(10_000, 30_000),
    }
    command = [sys.executable, "-m", "tests.tuning.distributed_worker", str(folder), *runs]
    environments = [
        ENVIRONMENT | {k: str(v) for k, v in {**shared, "RANK": r, "LOCAL_RANK": r}.items()}
        for r in range(PROCESSES)
    ]
    return [subprocess.Popen(command, cwd=ROOT, env=environment) for environment in environments]


def kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder with the results of all runs. One of them was killed as soon as it had saved its
    first state, and then resumed.
    """
    folder = tmp_path_factory.mktemp("distributed")
    write_images(folder / "images")
    torch.manual_seed(0)
    model = timm.create_model(TINY)
    report = dcls_convert.convert_(model, dilated_size=9)
    dcls_convert.save_converted(model, report.plan, folder / "tiny-dcls9")
    state = folder / "killed" / "state.pt"
    run = start(folder, "killed")
    try:
        while not state.exists():
            assert not any(process.poll() for process in run)
            time.sleep(0.01)
    finally:
        kill(run)
    state.with_name("first.pt").write_bytes(state.read_bytes())
    processes = start(folder, "resumed", "whole", "taught", "taught-fsdp", "steps")
    try:
        assert not any(process.wait(timeout=600) for process in processes)
    finally:
        kill(processes)
    return folder


# Training steps.


@pytest.fixture(scope="module")
def trained(folder):
    """The results of all cases, by rank."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


trained_alone = functools.cache(train)


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)))
def test_steps_equal_those_of_one_process_with_the_whole_batch_and_ties_hold(trained, index, case):
    alone = trained_alone(dataclasses.replace(case, engine="none"))
    first = trained[0][index]
    for kind in ("state", "averaged"):
        assert list(first[kind]) == list(alone[kind])
        torch.testing.assert_close(first[kind], alone[kind], rtol=0, atol=FLOAT64_ATOL)
    losses = torch.stack([results[index]["losses"] for results in trained]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=FLOAT64_ATOL)
    start = converted(case)
    moved = alone["state"]["stages.2.blocks.dcls_positions"] - start.stages[2].blocks.dcls_positions
    assert moved.abs().max() > 0.1
    for results in trained:
        assert results[index]["ties"] == results[index]["ties averaged"] == alone["ties"]
        assert results[index]["parameters"] == alone["parameters"]
        assert results[index]["record"] == alone["record"]
    assert {count for _, count in alone["ties"]} == {1}
    start.load_state_dict(first["state"])  # the gathered state loads into an unsharded model
    at_border = first["state"]["stages.2.blocks.dcls_positions"].abs() == 4
    # Some positions were clamped, but not all.
    assert case.dilated_size != (9, 9) or 0.01 < at_border.double().mean() < 0.9


# Runs of examples/finetune.py.


def test_a_killed_and_resumed_run_ends_like_an_uninterrupted_one(folder):
    resumed = folder / "killed"
    whole = folder / "whole"
    paths = (resumed / "first.pt", resumed / "state.pt", whole / "state.pt")
    first, state, expected = (torch.load(path, weights_only=True) for path in paths)
    assert first["update"] < state["update"] == 8
    for run_state in (state, expected):
        assert [len(run_state["curves"].pop(name)) for name in ("seconds", "steps")] == [4, 8]
    # Compare leaves by path, since saving turns tuples into lists.
    for (path, leaf), (other_path, other) in zip(
        *(tree_flatten_with_path(s)[0] for s in (state, expected)), strict=True
    ):
        assert path == other_path
        assert torch.equal(leaf, other) if isinstance(other, torch.Tensor) else leaf == other
    for file in ("best/model.safetensors", "best/config.json", "history.json"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    for run in (resumed, whole):  # only one process writes records
        assert [record.step for record in read_track(run / "positions.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("run", ["taught", "taught-fsdp"])
def test_a_student_with_the_weights_of_its_teacher_agrees_with_it(folder, run):
    curves = torch.load(folder / run / "state.pt", weights_only=True)["curves"]
    assert curves["top1"] == [100]
    assert max(map(abs, curves["loss"])) < 1e-5  # float32
