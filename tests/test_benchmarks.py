"""Benchmarks: tables show the stored results, and a new run loses nothing that is stored."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.processes
def test_the_tables_are_those_of_the_stored_results():
    checked = run("tables.py", "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.processes
def test_the_page_of_every_model_is_that_of_the_stored_results():
    printed = run("deep_sweep.py", "--table")
    assert printed.stdout == (BENCHMARKS / "deep_sweep.md").read_text(encoding="utf-8")


@pytest.mark.processes
def test_constructions_that_are_timed_give_the_same_kernels():
    implementations = ["ours", "v0", "v1", "listing", "ours gaussian", "gauss"]
    checked = run("construction.py", "--check", "cpu", *implementations)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes three minutes on a GPU")
def test_without_a_gpu_its_benchmark_says_so():
    refused = run("gpu.py")
    assert refused.returncode == 1
    assert refused.stderr == "error: torch finds no GPU here (CUDA or ROCm)\n"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_the_benchmark_for_gpus_runs_to_its_end_on_one_that_is_not_there(tmp_path):
    pytest.importorskip("triton")
    program = Path(__file__).with_name("gpu_benchmark.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert report["failures"] == []
    assert len(report["rows"]) == 36
    assert done.stdout.endswith("float32, contiguous\n")  # launches that do nothing are not exact


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_the_host_time_of_a_layer_is_measured_without_a_gpu():
    pytest.importorskip("triton")
    measured = run("gpu_host.py", "--rounds", "1")
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.startswith("launches of the layer's step: 8\n")


def test_rows_of_other_settings_are_not_replaced(tmp_path):
    results = tmp_path / "cli.jsonl"
    content = '{"settings": {"repeats": 1, "threads": 1}}\n{"case": "a"}\n'
    results.write_text(content, encoding="utf-8")
    refused = run("cli.py", "--output", str(results))
    assert refused.returncode == 1
    assert "other settings" in refused.stderr
    assert "repeats: 1, not 5" in refused.stderr
    assert "threads: 1, not None" in refused.stderr
    assert results.read_text(encoding="utf-8") == content
