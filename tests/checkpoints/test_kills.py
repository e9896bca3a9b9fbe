"""A save with force over an old folder, killed at any moment: the old or the new folder is there, whole.

DCLS_CONVERT_KILLS=200 kills saves at 200 moments for each signal; `pytest -m processes` does a few.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from dcls_convert import save_converted
from dcls_convert.checkpoints.folder import FILES
from dcls_convert.checkpoints.output import clean_up
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder

from .folders import convert

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork and renameat2"),
]

MOMENTS = int(os.environ.get("DCLS_CONVERT_KILLS", "8"))
# Forks a process for every line that it reads; that one saves over the folder, slowly around each renaming.
SAVER = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
from dcls_convert.checkpoints import output
from dcls_convert.checkpoints.save import save_converted
from dcls_convert.reports.report import predict_report
from tests.checkpoints.folders import convert

def interrupt(*_):
    raise KeyboardInterrupt

def slow(call):
    def slowly(*args, **options):
        time.sleep(0.01)
        try:
            return call(*args, **options)
        finally:
            time.sleep(0.01)
    return slowly

model, plan = convert(seed=1)
report = predict_report(plan)
if sys.argv[2] == "steps":
    output._rename = lambda *_: False
for name in ("_rename", "_fsync", "_remove"):
    setattr(output, name, slow(getattr(output, name)))
os.rename = slow(os.rename)
print("ready", flush=True)
for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, interrupt)
        try:
            print(os.getpid(), flush=True)
            save_converted(model, plan, sys.argv[1], report=report, force=True, fingerprint=False)
        except KeyboardInterrupt:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """The files of the old folder and of the new one, which are whole by verify."""
    base = tmp_path_factory.mktemp("versions")
    for name, seed in (("old", 0), ("new", 1)):
        save_converted(*convert(seed=seed), base / name, fingerprint=False)
        assert verify_folder(base / name, rebuild=rebuild_here).ok
    return {name: {file: (base / name / file).read_bytes() for file in FILES} for name in ("old", "new")}


@contextlib.contextmanager
def saver(folder, how):
    """A function that starts a save, sends a signal after some seconds, and returns how long the save took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SAVER, str(folder), how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "ready\n"

        def save(number=None, after=0.0):
            process.stdin.write("\n")
            process.stdin.flush()
            pid, began = int(process.stdout.readline()), time.monotonic()
            if number is not None:
                time.sleep(after)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            assert process.stdout.readline() == "ended\n"
            return time.monotonic() - began

        yield save


def write(folder, version):
    folder.mkdir(exist_ok=True)
    for name, content in version.items():
        (folder / name).write_bytes(content)


def version_of(folder, versions):
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return next((name for name, version in versions.items() if version == found), None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_old_or_the_new_folder_is_there_at_every_moment(tmp_path, versions, number):
    folder = tmp_path / "out"
    write(folder, versions["old"])
    with saver(folder, "exchange") as save:
        seconds = save()
        assert version_of(folder, versions) == "new"
        seen = []
        for moment in range(MOMENTS):
            write(folder, versions["old"])
            save(number, after=seconds * moment / (MOMENTS - 1))
            seen.append(version_of(folder, versions))
            left = [path.name for path in tmp_path.iterdir() if path != folder]
            assert not left or number == signal.SIGKILL, left
    assert None not in seen
    assert seen[0] == "old"
    assert MOMENTS < 100 or {"old", "new"} == set(seen)
    assert verify_folder(folder, rebuild=rebuild_here).ok
    clean_up(folder)  # as the next run does
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_an_exchange_of_names_the_next_run_finds_one_of_both(tmp_path, versions):
    """A kill between two renames hides the old folder until then."""
    folder = tmp_path / "out"
    write(folder, versions["old"])
    with saver(folder, "steps") as save:
        seconds = save()
        for moment in range(MOMENTS):
            write(folder, versions["old"])
            save(signal.SIGKILL, after=seconds * moment / (MOMENTS - 1))
            clean_up(folder)
            assert version_of(folder, versions) is not None, moment
            assert [path.name for path in tmp_path.iterdir()] == ["out"]
