"""Triton's kernels without a GPU: what they compute, in its interpreter, and the machine code that GPUs would get."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 99 * 1024  # bytes that a program may take on the smallest GPUs of the generation of sm_80
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def test_in_the_interpreter():
    tests = Path(__file__).with_name("interpreted_depthwise.py")
    # It decides as kernels are imported: in a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--durations=10", tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


def test_machine_code(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_code

    print(gpu_code.HEAD)
    kernels = set()
    for names, code in gpu_code.table(gpu_code.CASES):
        print(gpu_code.line(names, code))
        assert code.spills == 0
        assert code.shared <= SHARED
        kernel = names.split()[-1]
        assert (code.products > 0) == (kernel in ("convolve", "correlate"))
        kernels.add(kernel)
    assert kernels == {"copy_maps", "make_bank", "convolve", "correlate"}
