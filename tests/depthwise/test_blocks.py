"""Blocks give torch's results in Triton's interpreter, and compile for GPUs that are not here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from .compiled_kernels import (
    GPUS,
    compile_for,
    jit_functions,
    launches_of_layers,
)

ROOT = Path(__file__).parents[2]
NO_COMPILER = not (shutil.which("cc") or shutil.which("gcc"))


def run_program(name, *arguments, **environment):
    """Run a program beside this file in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", f"tests.depthwise.{name}", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def interpret(*functions):
    printed = run_program("interpreted", *functions, TRITON_INTERPRET="1")
    assert printed == [word for name in functions for word in (name, "ok")]


@pytest.mark.slow  # compiles the kernels
@pytest.mark.skipif(NO_COMPILER, reason="no C compiler")
def test_layers_launch_blocks_on_a_gpu_that_is_not_there(tmp_path):
    """Eight launches a step; this also fails if a GPU would not take blocks."""
    assert run_program("on_fake_gpu", str(tmp_path)) == ["ok"]


def test_small_integers_are_exact():
    interpret("few_exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        "all_exact",
        "layers",
        "rare_layers",
        "clamped_positions",
        "dense_layers",
    ],
)
def test_the_results_are_those_of_torch(function):
    interpret(function)


SHARED_BYTES = 99 * 1024  # of one program, on the smallest GPUs


def test_the_source_of_a_kernel_needs_no_names_but_those_of_triton():
    """torch.compile copies it into a module that has imported `triton` and `tl` alone."""
    for function in jit_functions().values():
        exec(function.src, {"triton": triton, "tl": triton.language})


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_compile_without_spilling(gpu):
    target = GPUS[gpu]
    for launch in launches_of_layers(target):
        compiled = compile_for(target, launch)
        assert compiled.spilled_bytes == 0, launch
        assert compiled.shared_bytes <= SHARED_BYTES, launch
        # ptxas says so if products of tensor cores wait for each other.
        assert "serialized" not in compiled.messages, launch
        if gpu == "sm_90" and launch.stages > 1:
            assert "wgmma" in compiled.code, launch


@pytest.mark.slow
def test_kernels_compile_with_sizes_of_one_as_constants():
    """As torch.compile makes them."""
    target = GPUS["sm_90"]
    for launch in launches_of_layers(target):
        compile_for(target, launch, ones=True)


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="no C compiler")
def test_a_compiled_step_launches_what_an_eager_one_does(tmp_path):
    assert run_program("on_fake_gpu", str(tmp_path), "compiled") == ["ok"]
