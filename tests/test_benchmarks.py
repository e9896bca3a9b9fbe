"""The tables in the documentation are those of the stored results."""

import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcls_convert.depthwise import measured

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.processes
def test_the_tables_are_those_of_the_stored_results():
    run = subprocess.run([sys.executable, str(BENCHMARKS / "tables.py"), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_what_was_measured_on_a_gpu_is_what_is_chosen_by(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpu = importlib.import_module("gpu")
    table = tmp_path / "measured.json"
    table.write_bytes(measured.TABLE.read_bytes())
    for module in (gpu, measured):
        monkeypatch.setattr(module, "TABLE", table)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "some GPU")
    # Of torch's two settings for contiguous maps, the faster one counts; together, its three parts take 9 ms.
    ways = {("torch", False, "torch"): 12, ("torch, cuDNN", False, "torch"): 9, ("torch, last", True, "torch"): 1}
    rows = [
        {
            "map": [96, side, side],
            "window": [17, 17],
            "batch": 128,
            "way": way,
            "kind": "ours",
            "choice": choice,
            "channels_last": last,
            "ms": {part: {"median": whole / 3} for part in gpu.PARTS},
        }
        for side, triton in [(14, 10), (56, 8)]
        for (way, last, choice), whole in {**ways, ("ours", False, "triton"): triton, ("o", True, "triton"): 2}.items()
    ]
    gpu.write_table(rows)
    device = torch.device("cuda")
    chosen = {
        (side, last): measured.triton_is_faster(measured.measurements(device, torch.bfloat16, last), 289, side**2, 128)
        for side, last in itertools.product((7, 14, 56, 112), (False, True))
    }
    assert [key for key, triton in chosen.items() if triton] == [(56, False), (112, False)]
