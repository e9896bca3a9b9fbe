"""Jobs in worker processes: whatever one does to its process, the others are done, and no process is left."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pebble
import pytest

from dcls_convert.compare.workers import run_jobs

TIMEOUT = 5.0  # seconds for a job; the jobs that are to end in time take milliseconds on a quiet machine


def _raise(error):
    raise error


def _print():
    print("a job's words", flush=True)
    os.write(2, b"and more of them")


class Untellable(Exception):
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


def _eat():
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))


JOBS = {
    "square": lambda: 49,
    "exception": lambda: _raise(ZeroDivisionError("oh\nno")),
    "leave": lambda: sys.exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "untellable": lambda: _raise(Untellable()),
    "named": lambda: _raise(type("Odd\n\x1b[2J", (Exception,), {})()),
    "lock": threading.Lock,
    "local": lambda: lambda: 0,
    "eat": _eat,
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(60),
    "print": _print,
    "pid": os.getpid,
    "signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, set()),
}
KILLED = "its process was killed by SIGKILL (out of memory, or more than 4 GiB?)"
FAILURES = {
    "exception": "ZeroDivisionError: oh no (test_workers.py:",
    "leave": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "exit": "its process ended by itself, with exit code 7",
    "kill": KILLED,
    "abort": "its process was killed by SIGABRT",
    "stop": f"took longer than {TIMEOUT:g} s",
    "untellable": "Untellable: Untellable (test_workers.py:",
    "named": "Odd\\n\\x1b[2J: Odd\\n\\x1b[2J (test_workers.py:",
    "lock": "TypeError: cannot pickle '_thread.lock' object (workers.py:",
    "local": "local object",
    "segfault": "its process was killed by SIGSEGV",
    "hang": f"took longer than {TIMEOUT:g} s",
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
            assert (outcome.value, outcome.failure) == (49, None)
        else:
            assert outcome.value is None
            assert FAILURES[name] in outcome.failure, name
            assert outcome.failure.isprintable()


def test_a_job_that_takes_all_memory_fails_alone(monkeypatch):
    """The guard ends it: most of a gigabyte takes longer to write than the guard to look."""
    monkeypatch.setattr("dcls_convert.compare.workers.MOST_MEMORY", 1 << 30)
    started = time.monotonic()
    found = outcomes(["square", "eat", "square"], workers=1, timeout=60)
    assert [outcome.value for outcome in found] == [49, None, 49]
    assert found[1].failure == KILLED.replace("4 GiB", "1 GiB")
    assert time.monotonic() - started < 60


def test_a_worker_does_many_jobs_and_no_jobs_need_no_worker():
    assert len({outcome.value for outcome in outcomes(["pid"] * 4, workers=1)} | {os.getpid()}) == 2
    assert outcomes([], workers=3) == []


def test_what_a_job_prints_reaches_nobody(capfd):
    outcomes(["print"], workers=1)
    assert capfd.readouterr() == ("", "")


def test_workers_do_not_get_the_terminals_ctrl_c():
    """Not even while they start, when it would end them with a traceback."""
    assert signal.SIGINT in outcomes(["signals"], workers=1)[0].value
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_workers_that_cannot_start_fail_all_jobs():
    assert {outcome.failure for outcome in outcomes(["square"] * 3, workers=2, set_up=die)} == {
        "the worker processes died before they took a job"
    }


@pytest.mark.parametrize("lacks", ["task_scheduler_loop", "pool_manager_loop", "message_manager_loop"])
def test_too_few_threads_for_the_pool_are_an_error_and_no_hang(monkeypatch, lacks):
    start, started = pebble.pool.process.launch_thread, []

    def launch(name, function, *arguments):
        if function.__name__ == lacks:
            raise RuntimeError("can't start new thread")
        started.append(start(name, function, *arguments))
        return started[-1]

    monkeypatch.setattr("pebble.pool.process.launch_thread", launch)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(30)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            outcomes(["square"], workers=1)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert not any(thread.is_alive() for thread in started)


def test_closing_the_iterator_ends_the_workers_in_the_middle_of_their_jobs():
    found = run_jobs(do, ["square", "hang", "hang"], workers=2)
    assert next(found).value == 49
    started = time.monotonic()
    found.close()
    assert time.monotonic() - started < 5


def start_and_hang(path):
    path.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)


def test_what_a_job_started_ends_with_it(tmp_path):
    path = tmp_path / "pid"
    (outcome,) = run_jobs(start_and_hang, [path], workers=1, timeout=TIMEOUT)
    assert outcome.failure == FAILURES["hang"]
    assert gone({int(path.read_text())})


PROGRAM = """
import signal, sys
from dcls_convert.compare.workers import run_jobs
from tests.compare.test_workers import do

def interrupt(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
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
    # CPython's tracker of semaphores outlives a killed parent, and says in two lines that it cleans up.
    assert errors == "" or (number == signal.SIGKILL and errors.count("\n") == 2 and "semaphore" in errors)
    assert gone(pids)


def gone(pids):
    """Whether these processes end within ten seconds."""
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
