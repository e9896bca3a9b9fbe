"""Training in several processes gives what training in one does.

A killed and resumed run of examples/finetune.py ends like one that was not killed.
"""

import dataclasses
import functools
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import timm
import torch
from torch.utils._pytree import tree_flatten_with_path

import dcls_convert

from ..conftest import TINY
from .distributed_worker import CASES, converted, train

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
FINETUNE = str(ROOT / "examples" / "finetune.py")
PROCESSES = 2
FLOAT64_ATOL = 1e-9  # Adam divides by roots of small gradients, which amplifies rounding (1e-16)
# One core for each process, and no GPU even if there is one.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def stop(processes: list[psutil.Popen]) -> None:
    """Kill processes of this test and all their descendants, those in sessions of their own included."""
    alive = [process for process in processes if process.poll() is None]
    family = [member for process in alive for member in [*process.children(recursive=True), process]]
    for member in family:
        member.kill()
    psutil.wait_procs(family)


def finish(*processes: psutil.Popen) -> None:
    try:
        assert not any(process.wait(timeout=300) for process in processes)
    finally:
        stop([*processes])


# Training steps.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of all cases, by rank. The processes start once for all cases, since starting takes longest."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "tests.tuning.distributed_worker"]
    start = functools.partial(psutil.Popen, cwd=ROOT, env=ENVIRONMENT)
    finish(*(start([*command, str(rank), str(PROCESSES), str(folder)]) for rank in range(PROCESSES)))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


trained_alone = functools.cache(train)


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)))
def test_steps_are_those_of_one_process_with_the_whole_batch_and_ties_hold(trained, index, case):
    alone, first = trained_alone(dataclasses.replace(case, engine="none")), trained[0][index]
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
    start.load_state_dict(first["state"])  # of all processes, in one
    reached = first["state"]["stages.2.blocks.dcls_positions"].abs() == 4
    assert case.dilated_size != (9, 9) or 0.01 < reached.double().mean() < 0.9  # clamping had work to do


# A run of examples/finetune.py that is killed.


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def finetune(folder: Path, output: str, *more: str) -> psutil.Popen:
    """Start two processes by accelerate's launcher: 4 updates per epoch, a state saved every 2 updates."""
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
    options = ["--epochs", "2", "--batch-size", "72", "--accumulate", "2", "--save-every", "2", "--mixup", "0.2"]
    options += ["--lr", "0.005", "--drop-path", "0.2", "--output", output, *more]
    return psutil.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *launch, FINETUNE, folder.name, *options],
        cwd=folder.parent,
        env=ENVIRONMENT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune") / "tiny-dcls9"
    torch.manual_seed(0)
    model = timm.create_model(TINY)
    report = dcls_convert.convert_(model, dilated_size=9)
    return dcls_convert.save_converted(model, report.plan, folder)


def test_a_killed_run_that_is_resumed_ends_as_one_that_was_not(folder):
    killed_run, whole_run = folder.parent / "killed", folder.parent / "whole"
    finish(finetune(folder, "whole"))
    run = finetune(folder, "killed")
    try:  # killed as soon as it has saved its first state, before its last update
        while not (killed_run / "state.pt").exists():
            assert run.poll() is None
            time.sleep(0.01)
    finally:
        stop([run])
    updates = torch.load(killed_run / "state.pt", weights_only=True)["update"]
    finish(finetune(folder, "killed", "--resume"))
    state, expected = (torch.load(run / "state.pt", weights_only=True) for run in (killed_run, whole_run))
    assert updates < state["update"] == 8
    assert (state["settings"].pop("output"), expected["settings"].pop("output")) == ("killed", "whole")
    # By paths: saving turns tuples into lists.
    for (path, leaf), (other_path, other) in zip(
        *(tree_flatten_with_path(s)[0] for s in (state, expected)), strict=True
    ):
        assert path == other_path
        assert torch.equal(leaf, other) if isinstance(other, torch.Tensor) else leaf == other
    for file in ("best/model.safetensors", "best/config.json", "history.json"):
        assert (killed_run / file).read_bytes() == (whole_run / file).read_bytes()


@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_a_network_in_several_processes_agrees_with_a_teacher_of_its_own_weights(folder, more):
    output = f"taught{len(more)}"
    still = ["--lr", "0", "--drop-path", "0", "--mixup", "0.2", "--epochs", "1"]
    finish(finetune(folder, output, "--teacher", folder.name, *still, *more))
    history = torch.load(folder.parent / output / "state.pt", weights_only=True)["history"]
    assert history["agreement"] == [100]
    assert max(map(abs, history["loss"])) < 1e-5  # float32
