"""The pool of worker processes: whatever a job does to its process, the other jobs are done."""

import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dcls_convert.reports.workers import FUTILE_STARTS, Outcome, WorkerError, run_jobs

TIMEOUT = 1.0  # seconds for a job; the jobs that are to end in time take milliseconds


class _Stubborn:
    """Can be pickled, but not back."""

    def __reduce__(self):
        return (int, ("no number",))


def _leave(code):
    os._exit(code)


def _raise(error):
    raise error


def _hang():
    while True:
        time.sleep(60)


def _print(text):
    print(text)
    os.write(1, text.encode())
    return text


def _pid():
    return os.getpid()


JOBS = {
    "square": lambda: 49,
    "exception": lambda: _raise(ZeroDivisionError("oh\nno")),
    "leave": lambda: sys.exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt),
    "exit": lambda: _leave(7),
    "exit 0": lambda: _leave(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": _hang,
    "unpicklable": lambda: lambda: None,
    "stubborn": _Stubborn,
    "print": lambda: _print("a job's words"),
    "pid": _pid,
    "signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, set()),
}
FAILURES = {
    "exception": "ZeroDivisionError: oh no (test_workers.py:",
    "leave": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "exit": "its process ended by itself, with exit code 7",
    "exit 0": "its process ended by itself, with exit code 0",
    "kill": "its process was killed by SIGKILL (out of memory?)",
    "segfault": "its process was killed by SIGSEGV",
    "hang": "took longer than 1 s",
    "unpicklable": "Error: ",
    "stubborn": "its result cannot be read: ValueError",
}


def do(name):
    return JOBS[name]()


def die():
    os._exit(9)


def outcomes(jobs, **options):
    found = sorted(run_jobs(do, jobs, **options), key=lambda outcome: outcome.index)
    assert [outcome.index for outcome in found] == list(range(len(jobs))), "one outcome a job"
    return found


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_every_crash_fails_its_job_alone(workers):
    jobs = ["square"]
    for name in FAILURES:
        jobs += [name, "square"]
    for name, outcome in zip(jobs, outcomes(jobs, workers=workers, timeout=TIMEOUT), strict=True):
        if name == "square":
            assert outcome == Outcome(index=outcome.index, value=49)
        else:
            assert outcome.value is None
            assert FAILURES[name] in outcome.failure, name
            assert "\n" not in outcome.failure


def test_a_worker_does_many_jobs_and_there_are_no_more_workers_than_jobs():
    assert len({outcome.value for outcome in outcomes(["pid"] * 4, workers=1)}) == 1
    assert outcomes([], workers=3) == []
    assert os.getpid() not in {outcome.value for outcome in outcomes(["pid"], workers=8)}


def test_workers_leave_the_signals_to_their_parent():
    """From their first instruction: Ctrl-C in a terminal goes to them too, and would be a traceback of each."""
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= outcomes(["signals"], workers=1)[0].value
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM} == set()


def test_what_a_job_prints_is_not_on_stdout(capfd):
    assert outcomes(["print"], workers=1)[0].value == "a job's words"
    assert capfd.readouterr().out == ""


def test_workers_that_cannot_start_end_the_run():
    with pytest.raises(WorkerError, match=f"{FUTILE_STARTS} worker processes in a row.*exit code 9"):
        list(run_jobs(do, ["square"] * 9, workers=2, set_up=die))


def test_closing_the_iterator_ends_the_workers_in_the_middle_of_their_jobs():
    found = run_jobs(do, ["square", "hang", "hang"], workers=2)
    assert next(found).value == 49
    started = time.monotonic()
    found.close()
    assert time.monotonic() - started < 5


def test_a_process_that_is_just_starting_is_not_forgotten(monkeypatch, capfd):
    """A signal comes when it exists and nobody has noted it, by way of another thread, whose mask is its own."""
    now = threading.Event()
    thread = threading.Thread(target=lambda: now.wait() and signal.raise_signal(signal.SIGINT))
    thread.start()
    started = []

    def spawn(*arguments):
        started.append(real(*arguments))
        now.set()
        thread.join()
        return started[-1]

    list(run_jobs(do, ["square"], workers=1))  # the tracker of resources is a process too, and stays
    real = multiprocessing.util.spawnv_passfds
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", spawn)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(do, ["square"], workers=1))
    (pid,) = started
    assert not _alive(pid), "neither running nor unnoticed in its end"
    assert signal.getsignal(signal.SIGINT) == before
    assert capfd.readouterr().err == ""


PROGRAM = """
import signal, sys
from dcls_convert.reports.workers import run_jobs
from tests.reports.test_workers import do

def interrupt(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        for outcome in run_jobs(do, ["pid", "pid", "hang", "hang"], workers=2):
            print(outcome.value, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_ends_everything_without_a_word(tmp_path, number):
    """To the whole group, as a terminal sends it; SIGKILL to the parent alone, whose workers must notice."""
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = {int(process.stdout.readline()) for _ in range(2)}
    time.sleep(0.2)  # the hanging jobs are under way
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if number != signal.SIGKILL else -9)
    assert errors == ""
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
