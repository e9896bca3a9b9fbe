"""Blocks give torch's results in Triton's interpreter, and compile for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget

from .compiled_kernels import KERNELS, compile_for

ROOT = Path(__file__).parents[2]


def interpret(*functions):
    """Run functions of `interpreted.py` in a process of its own."""
    command = [sys.executable, "-m", "tests.depthwise.interpreted", *functions]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for name in functions for word in (name, "ok")]


def test_small_integers_are_exact_and_launches_are_few():
    interpret("few_exact", "launches")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", ["all_exact", "layers", "rare_layers", "parts_of_large_tensors", "windows"]
)
def test_the_results_are_those_of_torch(function):
    interpret(function)


GPUS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"cuda": 99 * 1024, "hip": 64 * 1024}  # of the smallest GPUs
# `diagonals` and the like read scattered numbers; these move whole maps, blocks and banks.
MOVE_16_BYTES = {
    "pack": ("ld.global.v4", "st.global.v4"),
    "unpack": ("st.global.v4",),
    "convolve": ("0x10", "st.global.v4"),  # 16 bytes of cp.async
    "convolve turned": ("0x10", "st.global.v4"),
    "gradient_of_bank": ("0x10", "st.global.v4"),
    "bank_of_window": ("st.global.v4",),
    "bank_of_elements": ("st.global.v4",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_compile_without_spilling(gpu, name):
    target = GPUS[gpu]
    precisions = {"bf16": ["ieee"]}
    if KERNELS[name].is_pipelined:
        precisions["fp32"] = ["tf32", "tf32x3"] if target.backend == "cuda" else ["ieee"]
    for dtype, ways in precisions.items():
        for precision in ways:
            compiled = compile_for(target, name, dtype, precision)
            assert compiled.spilled == 0, (dtype, precision, compiled.spilled)
            assert compiled.shared_bytes <= SHARED_BYTES[target.backend]
            if target.backend == "cuda" and dtype == "bf16":
                for instruction in MOVE_16_BYTES.get(name, ()):
                    assert instruction in compiled.code, instruction
            if gpu == "sm_90" and KERNELS[name].is_pipelined:
                assert "wgmma" in compiled.code
