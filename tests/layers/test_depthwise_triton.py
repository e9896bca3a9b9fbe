"""Triton's kernels without a GPU: the machine code that GPUs would get."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = 99 * 1024  # bytes that a program may take on the smallest GPUs of the generation of sm_80
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


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
