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

from .distributed_worker import CASES, FLAT_CASES, converted, train, train_flat

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


@pytest.mark.parametrize(("index", "case"), list(enumerate(FLAT_CASES)))
def test_fsdp1_trains_as_one_process_and_says_what_cannot_be_done_with_flat_shards(
    trained, index, case
):
    alone = train_flat(case)
    together = [results["flat cases"][index] for results in trained]
    torch.testing.assert_close(together[0]["state"], alone["state"], rtol=0, atol=FLOAT64_ATOL)
    losses = torch.stack([results["losses"] for results in together]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=FLOAT64_ATOL)
    for results in together:
        torch.testing.assert_close(results["spreads"], alone["spreads"], rtol=0, atol=FLOAT64_ATOL)
        assert len(results["refusals"]) == 4
        assert all("FSDP1 has flattened" in message for message in results["refusals"])


def test_fsdp1_does_not_wrap_blocks_that_share_positions_one_by_one(trained):
    for results in trained:
        assert len(results["flat errors"]) == 3
        for message in results["flat errors"]:
            assert re.match("FSDP1 has sharded the positions .* wrap the whole stage", message)
