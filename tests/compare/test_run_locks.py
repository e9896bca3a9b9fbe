"""Each run has one process. Locks of living processes hold, those of dead ones are taken over."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from dcls_convert.compare import run_locks
from dcls_convert.compare.run_locks import LOCK_FILE, locked
from dcls_convert.process_identity import host_name

from ..image_folder import write_images

OTHER = "elsewhere-1"


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(run_locks, "SECONDS_BETWEEN_TOUCHES", 0.05)
    monkeypatch.setattr(run_locks, "SECONDS_UNTIL_STALE", 1.0)
    monkeypatch.setattr(run_locks, "SECONDS_TO_SETTLE", 0.2)


def test_a_lock_holds_until_its_block_ends(tmp_path):
    own = f"{host_name()}-{os.getpid()}"
    with locked(tmp_path, wait=False) as owner:
        assert owner is None
        for wait in (False, True):
            with locked(tmp_path, wait=wait) as other:
                assert other == own
    assert not (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path, wait=False) as owner:
        assert owner is None


def test_the_lock_of_a_dead_process_on_this_machine_is_taken_over_at_once(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    (tmp_path / LOCK_FILE).write_text(f"{host_name()}-{process.pid}")
    with locked(tmp_path, wait=False) as owner:
        assert owner is None


def test_the_lock_of_another_machine_is_taken_over_once_it_is_no_longer_touched(tmp_path):
    path = tmp_path / LOCK_FILE
    path.write_text(OTHER)
    with locked(tmp_path, wait=False) as owner:
        assert owner == OTHER
    ended = threading.Event()
    toucher = threading.Thread(target=run_locks._touch_until, args=(path, ended))
    toucher.start()
    with locked(tmp_path, wait=True) as owner:
        assert owner == OTHER
    ended.set()
    toucher.join()
    with locked(tmp_path, wait=True) as owner:
        assert owner is None


def _train_if_locked(folder, number):
    with locked(folder, wait=True) as owner:
        if owner is None:
            (folder / f"trained-{number}").touch()
            time.sleep(3)


@pytest.mark.parametrize("stale_lock", [False, True])
def test_of_processes_that_start_together_only_one_trains(tmp_path, stale_lock):
    if stale_lock:
        (tmp_path / LOCK_FILE).write_text(OTHER)
    context = multiprocessing.get_context("fork")
    processes = []
    for number in range(6):
        processes.append(context.Process(target=_train_if_locked, args=(tmp_path, number)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(list(tmp_path.glob("trained-*"))) == 1
    assert not (tmp_path / LOCK_FILE).exists()


TIME_FIELDS = ("step_ms", "images_per_second", "seconds")


def runs_without_times(folder):
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["missing"] == []
    for run in comparison["runs"]:
        for name in TIME_FIELDS:
            del run[name]
    return comparison["runs"]


@pytest.mark.processes
def test_calls_share_the_runs_and_those_of_a_killed_call_are_not_lost(tmp_path):
    """All runs equal those of a single call that is not disturbed."""
    write_images(tmp_path / "images")
    command = [sys.executable, "-m", "dcls_convert", "compare", "test_convnext", "--data", "images"]
    command += ["--sizes", "9", "--epochs", "3", "--seeds", "2", "--input-size", "3x32x32"]
    command += ["--batch-size", "4", "--device", "cpu", "--output"]
    calls = {}
    for options in (["whole"], ["out"], ["out"], ["out", "--only", "2/2"]):
        call = subprocess.Popen(
            command + options,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        calls[call.pid] = call
    while not (states := list(tmp_path.glob("out/runs/*/state.pt"))):
        time.sleep(0.01)
    _, _, owner = states[0].with_name(LOCK_FILE).read_text().rpartition("-")
    killed = calls.pop(int(owner))
    killed.kill()
    killed.communicate()
    outputs = [call.communicate(timeout=500) for call in calls.values()]
    assert [call.returncode for call in calls.values()] == [0, 0, 0], outputs
    assert runs_without_times(tmp_path / "out") == runs_without_times(tmp_path / "whole")
    for track in tmp_path.glob("out/runs/*/positions.jsonl"):
        undisturbed = tmp_path / "whole" / track.relative_to(tmp_path / "out")
        assert track.read_bytes() == undisturbed.read_bytes()
    assert not list(tmp_path.glob(f"out/runs/*/{LOCK_FILE}"))
