"""Benchmarks: documents show the stored results, and what is timed computes the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: Path, *arguments: str) -> str:
    """Run a script that succeeds; return what it printed."""
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_tables_are_those_of_the_stored_results():
    run(BENCHMARKS / "tables.py", "--check")
    printed = run(BENCHMARKS / "deep_sweep.py", "--table")
    assert printed == (BENCHMARKS / "deep_sweep.md").read_text(encoding="utf-8")


@pytest.mark.processes
def test_constructions_that_are_timed_give_the_same_kernels():
    implementations = ["ours", "v0", "v1", "listing", "ours gaussian", "gauss"]
    run(BENCHMARKS / "construction.py", "--check", "cpu", *implementations)


# A GPU is at hand rarely, and its benchmark must then work at once.
NEEDS_COMPILERS = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.mark.slow
@NEEDS_COMPILERS
def test_the_benchmark_for_gpus_runs_to_its_end_on_one_that_is_not_there(tmp_path):
    pytest.importorskip("triton")
    printed = run(Path(__file__).with_name("gpu_benchmark.py"), str(tmp_path))
    report = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert report["failures"] == []
    assert len(report["rows"]) == 42
    assert printed.endswith("float32, contiguous\n")  # launches that do nothing are not exact


@pytest.mark.slow
@NEEDS_COMPILERS
def test_the_host_time_of_a_layer_is_measured_without_a_gpu():
    pytest.importorskip("triton")
    printed = run(BENCHMARKS / "gpu_host.py", "--rounds", "1")
    assert printed.startswith("launches of the layer's step: 8\n")
