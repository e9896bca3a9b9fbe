"""Weights are in memory once, as each command's peak shows, without what the imports take."""

import json
import os
import subprocess
import sys

import pytest

LIMIT = 1.2  # times the weights
PROGRAM = """
import json, re, sys
from pathlib import Path
import timm
from safetensors.torch import save_file
from dcls_convert.cli.app import main

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def peaks_of(name):
    convert = f"{name} --dilated-size 9 --input-size 3x64x64 --output"
    weights = f"--checkpoint {name}.safetensors --init largest"
    state = timm.create_model(name).state_dict()
    save_file(state, f"{name}.safetensors")
    size = sum(tensor.nbytes for tensor in state.values())
    del state
    peaks, before = {}, status("VmRSS")
    for command, line in {
        "convert": f"{convert} {name}-new",
        "convert --checkpoint": f"{convert} {name}-largest {weights}",
        "verify": f"verify {name}-new",
        "fold": f"fold {name}-new --output {name}-folded",
    }.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        try:
            sys.argv[1:] = line.split() + ["--quiet"] * ("--output" in line)
            main()
        except SystemExit as end:
            assert end.code == 0, command
        peaks[command] = (status("VmHWM") - before) / size
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
    # `fold` tries the folder with timm, which draws random weights and maps the file's.
    assert {name: peak for name, peak in peaks.items() if peak > LIMIT + (name == "fold")} == {}
    assert min(peaks.values()) > 0.9, "the weights must have been there once"
