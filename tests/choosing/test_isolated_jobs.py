"""Workers: whatever a job or a model does to its process, all other jobs are done, and no process
is left behind.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dcls_convert.choosing.isolated_jobs import run_jobs

pytestmark = pytest.mark.processes

# Time limit of a job in seconds. Jobs that should meet it take milliseconds on a quiet machine.
TIMEOUT = 3.0
SECONDS_PER_MODEL = 15  # good models take a second on an idle core


def fail():
    raise ZeroDivisionError("oh\nno")


LATE = f"took longer than {TIMEOUT:g} s"
JOBS = {  # name -> function, and why it fails or None
    "square": (lambda: 49, None),
    "pid": (os.getpid, None),
    "exception": (fail, "ZeroDivisionError: oh no (test_isolated_jobs.py:"),
    "leave": (lambda: sys.exit(3), "SystemExit: 3"),
    "exit": (lambda: os._exit(7), "its process ended by itself, with exit code 7"),
    "hang": (lambda: time.sleep(600), LATE),
}


def do(name):
    return JOBS[name][0]()


def die():
    os._exit(9)


def outcomes(jobs, **options):
    indices, *rows = zip(*sorted(run_jobs(do, jobs, **options)), strict=True)
    assert indices == tuple(range(len(jobs))), "one outcome per job"
    return rows


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert multiprocessing.active_children() == []


def test_a_crash_fails_only_its_own_job():
    jobs = [name for other in JOBS if other != "pid" for name in (other, "square")]
    for name, value, failure in zip(jobs, *outcomes(jobs, workers=2, timeout=TIMEOUT), strict=True):
        assert value == (49 if name == "square" else None)
        if JOBS[name][1] is None:
            assert failure is None
        else:
            assert JOBS[name][1] in failure, name
            assert failure.isprintable()


def test_a_worker_does_many_jobs_and_if_no_worker_can_start_all_jobs_fail():
    values, _ = outcomes(["pid"] * 4, workers=1)
    assert len({*values, os.getpid()}) == 2
    assert list(run_jobs(do, [], workers=3)) == []
    _, failures = outcomes(["square"] * 3, workers=2, set_up=die)
    assert set(failures) == {"the worker processes died before they took a job"}


PROGRAM = """
import signal, sys
from dcls_convert.choosing.isolated_jobs import run_jobs
from tests.compare.test_isolated_jobs import do

def interrupt(*_):
    raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        for _, value, _ in run_jobs(do, ["pid", "pid", "hang", "hang"], workers=2):
            print(value, flush=True)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("moment", ["during start", "during work"])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_a_signal_ends_all_processes_without_output(tmp_path, number, moment):
    """SIGINT goes to the whole process group, as from a terminal.

    Other signals go only to the parent, and its workers must notice.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    parent = psutil.Process(process.pid)
    # Two workers and CPython's resource tracker.
    while len(children := parent.children(recursive=True)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    # CPython now sends the last worker its data. A worker that gets none prints an error.
    time.sleep(0.1)
    if moment == "during work":
        for _ in range(2):
            process.stdout.readline()
        time.sleep(0.2)  # until the hanging jobs run
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if number != signal.SIGKILL else -9)
    # The tracker outlives a killed parent, and may report that it cleans up.
    assert errors == "" or (
        number == signal.SIGKILL and all("semaphore" in line for line in errors.splitlines()[::2])
    )
    assert psutil.wait_procs(children, timeout=10)[1] == []


def hang_without_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def flood_output():
    for number in (1, 2):
        os.write(number, b"many words of a model\n" * 100_000)
    raise ValueError("hoarse\x1b[2J")


HOSTILE = {
    "kill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "its process was killed by SIGKILL (out of memory?)",
    ),
    "hang": (hang_without_signals, f"took longer than {SECONDS_PER_MODEL} s"),
    "shout": (flood_output, "timm:hostile_shout: cannot be built: ValueError: hoarse\\x1b[2J"),
    "no_module": (lambda: 7, "timm:hostile_no_module: cannot be built: AttributeError: "),
}


def set_up_with_hostile_models():
    """Set up a worker with models that harm their process.

    timm is imported only here, so that workers of other tests start quickly.
    """
    import timm

    from dcls_convert.choosing.survey import set_up_worker

    set_up_worker()
    globals()["__all__"] = []  # timm adds the names of models to it
    for name, (work, _) in HOSTILE.items():

        def build(pretrained=False, work=work, **_):
            return work()

        build.__name__ = build.__qualname__ = f"hostile_{name}"
        timm.models.register_model(build)


def test_a_model_that_harms_its_process_is_a_row_with_a_readable_reason(monkeypatch, capfd):
    from dcls_convert.choosing import survey

    from ..command_line import exit_code

    names = [name for bad in HOSTILE for name in (f"timm:hostile_{bad}", "timm:test_convnext")]
    monkeypatch.setattr(survey, "registry_names", lambda: names)
    monkeypatch.setattr(survey, "set_up_worker", set_up_with_hostile_models)
    assert exit_code("models", "--json", "--jobs", "2", "--timeout", SECONDS_PER_MODEL) == 1
    out, err = capfd.readouterr()
    models = json.loads(out)["models"]
    good = models[1::2]
    bad = models[::2]
    assert all(row == good[0] and row["status"] == "planned" for row in good)
    for row, (_, reason) in zip(bad, HOSTILE.values(), strict=True):
        assert row["status"] == "failed"
        assert row["reason"].startswith(reason)
    assert all(line.isprintable() for line in [*(row["reason"] for row in bad), *err.splitlines()])
