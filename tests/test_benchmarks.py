"""Benchmarks: documents show the stored results, and what is timed computes the same."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
IMPORT_ALL = """
import runpy, sys
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="imported")
    except ModuleNotFoundError as error:  # some need packages of their own
        if error.name.startswith("dcls_convert"):
            raise
"""


def run(*command: str | Path) -> str:
    """Run a script that succeeds; return what it printed."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
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


@pytest.mark.processes
def test_all_that_scripts_import_of_the_package_is_there(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{BENCHMARKS}:{BENCHMARKS.parent}")
    run("-c", IMPORT_ALL, *sorted(BENCHMARKS.glob("*.py")))


def test_neither_a_slower_machine_nor_one_bad_round_changes_the_ratio_of_networks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpu = importlib.import_module("gpu")
    milliseconds = {"original": 3.0, "converted": 2.0}
    timed = []

    def elapsed(name, calls):
        timed.append(name)
        finished_rounds = (len(timed) - 1) // 2
        bad = 7 if len(timed) == 9 else 1
        return milliseconds[name] * bad * 2**finished_rounds

    monkeypatch.setattr(gpu, "calls_in_a_round", lambda call, sizes: 1)
    monkeypatch.setattr(gpu, "elapsed", elapsed)
    times = gpu.times_in_turn({name: name for name in milliseconds}, gpu.Sizes(rounds=15))
    assert gpu.ratio_row(times) == {"ratio": 1.5, "ratio_quartiles": [1.5, 1.5]}
    assert timed[:4] == ["original", "converted", "converted", "original"]


def test_a_long_training_fits_into_its_minutes_or_leaves_networks_out(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("long_training")
    steps = 36
    for seconds in (1e-4, 0.01, 0.05, 0.2, 1.0):
        times = dict.fromkeys(script.NETWORKS, script.Times(step=seconds, rest=2.0))
        networks, epochs = script.plan(times, steps, 600.0)
        assert networks[:2] == ["original", "17"]
        planned = script.SEEDS * sum(times[name].of_run(epochs * steps) for name in networks)
        assert planned <= 600 or epochs == 1
        assert len(networks) == 2 or script.MIN_EPOCHS <= epochs <= script.MAX_EPOCHS


@pytest.mark.processes
def test_a_long_training_runs_in_miniature(tmp_path):
    output = tmp_path / "runs.jsonl"
    printed = run(BENCHMARKS / "long_training.py", "--tiny", "--output", output)
    assert "PLAN: 5 seeds of original, 17, 17-frozen, 17-dense, 17-kernel; 1 epochs" in printed
    assert run(BENCHMARKS / "long_training.py", "--table", output) in printed
