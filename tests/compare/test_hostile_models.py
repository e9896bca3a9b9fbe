"""`dcls-convert models` over models that harm their process: a row with a plain reason for each, and no more."""

import json
import multiprocessing

import pytest

from dcls_convert.compare import survey, workers

from ..conftest import TINY
from . import hostile_models
from .test_survey import run
from .test_workers import gone

GOOD = f"timm:{TINY}"
SECONDS = 12  # for one model; the good ones take a second on an idle core
MEMORY = 2 << 30  # bytes of a worker, of which imports take 0.5
LATE = f"took longer than {SECONDS} s"
REASONS = {
    "hang_in_c": LATE,
    "hang_without_signals": LATE,
    "stop": LATE,
    "eat_memory": "its process was killed by SIGKILL (out of memory, or more than 2 GiB?)",
    "kill": "its process was killed by SIGKILL (out of memory, or more than 2 GiB?)",
    "abort": "its process was killed by SIGABRT",
    "exit_at_once": "its process ended by itself, with exit code 4",
    "leave": "timm:hostile_leave: its factory leaves the program (SystemExit bye bye)",
    "interrupt": "KeyboardInterrupt: KeyboardInterrupt (hostile_models.py:",
    "base_exception": "BaseException: all\\x1b[2Jgone (hostile_models.py:",
    "start_and_hang": LATE,
    "start_and_die": "its process ended by itself, with exit code 3",
    "shout": "timm:hostile_shout: cannot be built: ValueError: hoarse",
    "untellable": "timm:hostile_untellable: cannot be built: Untellable: Untellable",
    "endless": LATE,
    "long": "timm:hostile_long: cannot be built: Long: no\\x1b[31m no\\x1b[31m no",
    "no_module": "timm:hostile_no_module: cannot be built: AttributeError: ",
    "recurse": "timm:hostile_recurse: cannot be built: RecursionError: maximum recursion depth exceeded",
}


@pytest.fixture
def hostile(monkeypatch, tmp_path):
    """The survey of these models, each followed by a good one; nothing survives."""
    names = [name for bad in hostile_models.HOSTILE for name in (f"timm:hostile_{bad}", GOOD)]
    monkeypatch.setattr(survey, "registry_names", lambda: names)
    monkeypatch.setattr(survey, "set_up_worker", hostile_models.set_up)
    monkeypatch.setattr(workers, "MOST_MEMORY", MEMORY)
    pids = tmp_path / "pids"
    monkeypatch.setenv(hostile_models.PIDS, str(pids))
    yield
    assert multiprocessing.active_children() == []
    assert gone(set(map(int, pids.read_text().split())))


@pytest.mark.processes
@pytest.mark.usefixtures("hostile")
def test_a_model_that_harms_its_process_is_a_row_with_a_plain_reason(capfd):
    assert run("--json", "--jobs", "2", "--timeout", str(SECONDS)) == 1
    out, err = capfd.readouterr()
    models = json.loads(out)["models"]
    good, bad = models[1::2], models[::2]
    assert all(row == good[0] and row["status"] == "planned" for row in good)
    assert [row["status"] for row in bad] == ["failed"] * len(REASONS)
    reasons = {row["name"].removeprefix("timm:hostile_"): row["reason"] for row in bad}
    assert {name: reason[: len(REASONS[name])] for name, reason in reasons.items()} == REASONS
    assert all(reason.isprintable() and len(reason) < 500 for reason in reasons.values())
    assert len(err.splitlines()) < 3 * len(models)
    assert all(line.isprintable() for line in err.splitlines())
