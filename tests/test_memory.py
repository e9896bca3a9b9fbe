"""Weights are in memory once, as each command's peak shows, without what the imports take."""

import json
import os
import subprocess
import sys

import pytest

LIMIT = 1.2  # times the weights
PROGRAM = """
import contextlib, gc, io, json, re, sys
from pathlib import Path
import timm
from safetensors.torch import save_file
from dcls_convert.checkpoints.load import load_converted
from dcls_convert.cli.app import main

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def shell(*arguments):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)

def peaks_of(name):
    folder, weights = f"{name}-folder", f"{name}.safetensors"
    convert = (name, "--dilated-size", "9", "--input-size", "3x64x64", "--output")
    largest = (f"{name}-largest", "--checkpoint", weights, "--init", "largest")
    works = {
        "convert": lambda: shell(*convert, folder),
        "convert --checkpoint": lambda: shell(*convert, *largest),
        "load_converted": lambda: load_converted(folder),
        "verify": lambda: shell("verify", folder),
        "fold": lambda: shell("fold", folder, "--output", f"{name}-folded"),
    }
    state = timm.create_model(name).state_dict()
    save_file(state, weights)
    size = sum(tensor.nbytes for tensor in state.values())
    del state
    peaks, before = {}, status("VmRSS")
    for command, work in works.items():
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        work()
        peaks[command] = (status("VmHWM") - before) / size
    assert all(Path(f"{name}-{written}").is_dir() for written in ("folder", "largest", "folded"))
    return peaks

peaks_of("test_convnext")  # what the first call imports and keeps
print(json.dumps(peaks_of("convnext_base")))
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_command_holds_a_second_copy_of_the_weights(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        # With this, glibc returns freed memory at once, so that freed tensors are not counted.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    print(peaks)
    # `fold` tries the folder with timm, which draws random weights and maps the file's.
    assert {name: peak for name, peak in peaks.items() if peak > LIMIT + (name == "fold")} == {}
    assert min(peaks.values()) > 0.9, "the weights must have been there once"
