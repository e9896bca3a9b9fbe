"""Outputs appear whole or not at all: what is refused, what is replaced, and what a failure or a
kill leaves.
"""

import errno
import functools
import itertools
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter

import pytest
from safetensors import SafetensorError

from dcls_convert import atomic_output, process_identity, save_converted
from dcls_convert.atomic_output import clean_up, new_file, new_folder
from dcls_convert.errors import CheckpointError

from .checkpoints.folders import convert


def folder_writer(text):
    """Return a function that writes a new folder, with a file that holds the text."""
    return _writer(
        text,
        "file",
        lambda path, force: new_folder(path, force=force, reason_to_keep=lambda _: None),
    )


def file_writer(text):
    """Return a function that writes a file that holds the text."""
    return _writer(text, "", lambda path, force: new_file(path, force=force))


def _writer(text, name, new):
    def write(path, *, force=False, between=lambda: None):
        with new(path, force) as partial:
            (partial / name).write_text(text)
            between()

    return write


def content(path):
    """Return the text that was written to the path; None if nothing was."""
    if not path.exists():
        return None
    if path.is_dir():
        path = path / "file"
    return path.read_text()


def without_renameat2(*_):
    return False


@pytest.fixture(params=["renameat2", "without it"])
def _platform(request, monkeypatch):
    """With and without the system call that exchanges two names."""
    if request.param != "renameat2":
        monkeypatch.setattr(atomic_output, "_renameat2", without_renameat2)


KINDS = pytest.mark.parametrize("kind", [folder_writer, file_writer])
PLATFORMS = pytest.mark.usefixtures("_platform")


@KINDS
@PLATFORMS
def test_what_is_there_is_replaced_by_force_alone(tmp_path, kind):
    path = tmp_path / "deep" / "er" / "out"
    kind("old")(path)
    with pytest.raises(
        CheckpointError, match=r"out already exists; force=True replaces it$"
    ) as refused:
        kind("new")(path)
    assert refused.value.on_command_line.endswith(
        "out already exists; --force replaces it, or name another"
    )
    assert content(path) == "old"
    kind("new")(path, force=True)
    assert content(path) == "new"
    assert list(path.parent.iterdir()) == [path]


@KINDS
@PLATFORMS
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("check_number", [0, 1])
def test_what_appears_meanwhile_is_replaced_by_force_alone(
    tmp_path, monkeypatch, kind, force, check_number
):
    """The other output comes before the last check of the name, or between check and renaming."""
    path = tmp_path / "out"
    check = atomic_output.check_output
    calls = itertools.count()

    def checked(*arguments, **options):
        check(*arguments, **options)
        if next(calls) == check_number:
            monkeypatch.setattr(atomic_output, "check_output", check)
            theirs = path / "file" if kind is folder_writer else path
            theirs.parent.mkdir(exist_ok=True)
            theirs.write_text("theirs")

    monkeypatch.setattr(atomic_output, "check_output", checked)
    if force:
        kind("ours")(path, force=True)
    else:
        with pytest.raises(CheckpointError, match="already exists"):
            kind("ours")(path)
    assert content(path) == ("ours" if force else "theirs")
    assert list(tmp_path.iterdir()) == [path]


def test_files_written_beside_a_file_are_published_before_it(tmp_path, monkeypatch):
    order = []
    publish = atomic_output._publish
    monkeypatch.setattr(
        atomic_output, "_publish", lambda new, *rest: (order.append(new.name), publish(new, *rest))
    )
    with new_file(tmp_path / "a.onnx", force=False) as path:
        path.write_text("main")
        path.with_name("a.onnx.data").write_text("beside")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.onnx": "main",
        "a.onnx.data": "beside",
    }
    assert order == ["a.onnx.data", "a.onnx"]


# --- What fails


READ_ONLY_CALLS = ("fspath", "stat", "lstat", "fstat", "is_dir", "access", "getpid")


def is_step(after, frame, event, argument):
    """True if the event is right before (or right `after`) a system call that may change files."""
    if event == ("c_return" if after else "c_call"):
        module = argument.__module__ or type(argument.__self__).__module__
        return module in ("posix", "io", "_io") and argument.__name__ not in READ_ONLY_CALLS
    return (
        event == ("return" if after else "call")
        and frame.f_code is atomic_output._renameat2.__code__
    )


def fail_with(error):
    raise error


def fail_at_step(write, step, act, after=False):
    """Call `write`, and call `act` before or after the `step`-th of its system calls.

    Return whether that call was reached, and whether writing failed.
    """
    moments = itertools.count(1)
    reached = []
    failed = False

    def profile(*event):
        if is_step(after, *event) and next(moments) == step:
            sys.setprofile(None)
            reached.append(step)
            act()

    sys.setprofile(profile)
    try:
        write()
    except (CheckpointError, OSError, KeyboardInterrupt):  # shutil may close twice, an OSError
        failed = True
    finally:
        sys.setprofile(None)
    return bool(reached), failed


def kill_at_step(write, step):
    """Like `fail_at_step`, but in another process, which is ended by SIGKILL."""
    if not (pid := os.fork()):
        try:
            fail_at_step(write, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    was_killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
    return was_killed, was_killed


FULL = OSError(errno.ENOSPC, "No space left")
WAYS_TO_END = {
    "full disk": functools.partial(fail_at_step, act=functools.partial(fail_with, FULL)),
    "interrupt": functools.partial(
        fail_at_step, act=functools.partial(fail_with, KeyboardInterrupt()), after=True
    ),
    "kill": kill_at_step,
}
ENDS = [
    pytest.param(end, marks=pytest.mark.processes if end == "kill" else ()) for end in WAYS_TO_END
]


# A file that was opened stays open if the next step fails.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@KINDS
@PLATFORMS
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_a_run_at_any_step_leaves_the_old_or_the_new_one(tmp_path, kind, force, end):
    """A failure leaves nothing else; what a kill leaves, the next run removes."""
    states = Counter()
    for step in itertools.count(1):
        path = tmp_path / str(step) / "out"
        path.parent.mkdir()
        if force:
            kind("old")(path)
        reached, failed = WAYS_TO_END[end](functools.partial(kind("new"), path, force=force), step)
        if end == "kill" and atomic_output._renameat2 is without_renameat2:
            clean_up(path)  # as the next run does
        state = content(path)
        assert state == "new" or (failed and state == ("old" if force else None)), (
            step,
            failed,
            state,
        )
        assert end == "kill" or list(path.parent.iterdir()) == ([path] if state else []), step
        states[state] += 1
        kind("next")(path, force=True)
        assert content(path) == "next"
        assert list(path.parent.iterdir()) == [path]
        if not reached:
            break
    assert len(states) == 2
    assert sum(states.values()) > 10


@pytest.mark.parametrize("error", [FULL, SafetensorError("No space left")], ids=repr)
def test_a_full_disk_is_one_line(tmp_path, error):
    folder_writer("old")(tmp_path / "out")
    for path, state in (
        (tmp_path / "new", "nothing was left there"),
        (tmp_path / "out", "the existing one is intact"),
    ):
        with pytest.raises(
            CheckpointError,
            match=f"^output {path} cannot be written: .*No space left.*; {state}$",
        ):
            folder_writer("new")(path, force=True, between=lambda: fail_with(error))
    assert content(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_permission_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        CheckpointError, match=f"output {tmp_path}/out: no permission to write in {tmp_path}$"
    ):
        folder_writer("new")(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_the_usual_ones(tmp_path, mask):
    before = os.umask(mask)
    try:
        file_writer("new")(tmp_path / "out")
        folder = save_converted(*convert(), tmp_path / "checkpoint", fingerprint=False)
    finally:
        os.umask(before)
    for path in (tmp_path / "out", folder, *folder.iterdir()):
        usual = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == usual & ~mask, path


# --- What killed runs left


def test_the_next_run_removes_what_ended_runs_left_and_nothing_else(tmp_path):
    host = process_identity.host_name()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    ended = process.pid
    kept = [
        f".other.{host}-{ended}.0123abcd.partial",
        f".out.x.{host}-{ended}.0123abcd.partial",
        f".out.{host}-{ended}.0123.partial",
        f"out.{host}-{ended}.0123abcd.partial",
        f".out.{host}-{os.getpid()}.0123abcd.partial",  # of a process that runs
        f".out.{host}-{os.getppid()}.0123abcd.partial",
        ".out.elsewhere-1.0123abcd.partial",  # of another host, a moment ago
    ]
    leftovers = [
        f".out.{host}-{ended}.0123abcd.partial",
        f".out.{host}-{ended}.4567abcd.partial",
        ".out.elsewhere-1.4567abcd.partial",
    ]
    for name in (*leftovers, *kept):
        (tmp_path / name / "out").mkdir(parents=True)
    long_ago = time.time() - atomic_output.SECONDS_UNTIL_LEFT_OVER - 1
    os.utime(tmp_path / leftovers[-1], (long_ago, long_ago))
    folder_writer("new")(tmp_path / "out")
    assert content(tmp_path / "out") == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out", *kept}


def _write_often(path):
    for number in range(30):
        with new_file(path, force=True) as partial:
            partial.write_text(f"{os.getpid()} {number}")


def test_processes_that_write_one_file_at_once_do_not_fail_each_other(tmp_path):
    processes = multiprocessing.get_context("fork")
    writers = [processes.Process(target=_write_often, args=(tmp_path / "out",)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert (tmp_path / "out").read_text().endswith(" 29")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
