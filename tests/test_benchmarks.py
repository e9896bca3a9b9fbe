"""Benchmarks: documents show the stored results, and what is timed computes the same."""

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
