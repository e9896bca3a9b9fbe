"""Training in several processes gives the same results as training in one."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def start(folder: Path) -> list[subprocess.Popen]:
    """Start two processes, as torchrun does, that train all cases."""
    command = [sys.executable, "-m", "tests.tuning.distributed_worker", str(folder)]
    environments = [
        ENVIRONMENT | {"WORLD_SIZE": str(PROCESSES), "RANK": str(rank)} for rank in range(PROCESSES)
    ]
    return [subprocess.Popen(command, cwd=ROOT, env=environment) for environment in environments]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the processes stored, by rank."""
    folder = tmp_path_factory.mktemp("distributed")
    processes = start(folder)
    try:
        assert not any(process.wait(timeout=600) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


trained_alone = functools.cache(train)


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)))
def test_steps_equal_those_of_one_process_with_the_whole_batch_and_ties_hold(trained, index, case):
    alone = trained_alone(dataclasses.replace(case, engine="none"))
    together = [results["cases"][index] for results in trained]
    first = together[0]
    for kind in ("state", "averaged", "gradients"):
        assert list(first[kind]) == list(alone[kind])
        torch.testing.assert_close(first[kind], alone[kind], rtol=0, atol=FLOAT64_ATOL)
    losses = torch.stack([results["losses"] for results in together]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=FLOAT64_ATOL)
    start = converted(case)
    name = "stages.2.blocks.0.conv_dw.positions"
    moved = alone["state"][name] - start.get_parameter(name)
    assert moved.abs().max() > 0.1
    for results in together:
        assert results["ties"] == results["ties averaged"] == alone["ties"]
    assert {count for _, count in alone["ties"]} == {1}
    start.load_state_dict(first["state"])  # the gathered state loads into an unsharded model
    at_border = first["state"]["stages.2.blocks.0.conv_dw.positions"].abs() == 4
    # Some positions were clamped, but not all.
    assert case.dilated_size != (9, 9) or 0.01 < at_border.double().mean() < 0.9


def test_blocks_that_share_positions_are_not_sharded_one_by_one(trained):
    for results in trained:
        assert re.match("FSDP2 has sharded the positions .* the whole stage", results["error"])
