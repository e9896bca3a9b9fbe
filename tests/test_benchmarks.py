"""Benchmarks: documented tables are those of the stored results."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.processes
def test_the_tables_are_those_of_the_stored_results():
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "tables.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
