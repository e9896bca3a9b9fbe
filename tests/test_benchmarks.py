"""Benchmarks: documented tables are those of the stored results, and what needs a GPU says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.processes
def test_the_tables_are_those_of_the_stored_results():
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "lines"),
    [([], "skipped"), pytest.param(["--smoke"], "matmul | ", marks=pytest.mark.slow)],
)
def test_without_a_gpu_the_benchmark_of_gpus_says_what_it_skips_and_can_be_tried(options, lines):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.count(lines)) == (0, 5 if options else 3), run.stderr
