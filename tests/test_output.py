"""Outputs appear whole or not at all: what is refused, what is replaced, and what a failure or a kill leaves."""

import errno
import functools
import itertools
import os
import resource
import shutil
import signal
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest

from dcls_convert import output, save_converted
from dcls_convert.errors import CheckpointError
from dcls_convert.output import clean_up, new_file, new_folder

from .checkpoints.folders import convert
from .forks import forked


def folder_of(text):
    """Fills a new folder with a file that holds the text."""
    return writer(text, "file", lambda path, force: new_folder(path, force=force, foreign=lambda _: None))


def file_of(text):
    return writer(text, "", lambda path, force: new_file(path, force=force))


def writer(text, name, new):
    def write(path, *, force=False, between=lambda: None):
        with new(path, force) as partial:
            (partial / name).write_text(text)
            between()

    return write


def content(path):
    """None where there is nothing."""
    return (path / "file" if path.is_dir() else path).read_text() if path.exists() else None


def without_renameat2(*_):
    return False


@pytest.fixture(params=["renameat2", "without it"])
def _platform(request, monkeypatch):
    """With and without the system call that exchanges two names."""
    if request.param != "renameat2":
        monkeypatch.setattr(output, "_renameat2", without_renameat2)


KINDS = pytest.mark.parametrize("kind", [folder_of, file_of])
PLATFORMS = pytest.mark.usefixtures("_platform")


@KINDS
@PLATFORMS
def test_what_is_there_is_replaced_by_force_alone(tmp_path, kind):
    path = tmp_path / "deep" / "er" / "out"
    kind("old")(path)
    with pytest.raises(CheckpointError, match=r"out already exists; force=True replaces it$") as refused:
        kind("new")(path)
    assert refused.value.on_command_line.endswith("out already exists; --force replaces it, or name another")
    assert content(path) == "old"
    kind("new")(path, force=True)
    assert content(path) == "new"
    assert list(path.parent.iterdir()) == [path]


@KINDS
@PLATFORMS
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_what_appears_meanwhile_is_replaced_by_force_alone(tmp_path, monkeypatch, kind, force, late):
    """Whether it comes before the last look at the name, or between that look and the renaming."""
    path, check, calls = tmp_path / "out", output.check_output, itertools.count()

    def checked(*arguments, **options):
        check(*arguments, **options)
        if next(calls) == late:
            monkeypatch.setattr(output, "check_output", check)
            theirs = path / "file" if kind is folder_of else path
            theirs.parent.mkdir(exist_ok=True)
            theirs.write_text("theirs")

    monkeypatch.setattr(output, "check_output", checked)
    if force:
        kind("ours")(path, force=True)
    else:
        with pytest.raises(CheckpointError, match="already exists"):
            kind("ours")(path)
    assert content(path) == ("ours" if force else "theirs")
    assert list(tmp_path.iterdir()) == [path]


def test_files_written_beside_a_file_are_published_before_it(tmp_path, monkeypatch):
    order, publish = [], output._publish
    monkeypatch.setattr(output, "_publish", lambda new, *rest: (order.append(new.name), publish(new, *rest)))
    with new_file(tmp_path / "a.onnx", force=False) as path:
        path.write_text("main")
        path.with_name("a.onnx.data").write_text("beside")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.onnx": "main", "a.onnx.data": "beside"}
    assert order == ["a.onnx.data", "a.onnx"]


# --- What fails


QUESTIONS = ("fspath", "stat", "lstat", "fstat", "is_dir", "access", "getpid")


def is_step(after, frame, event, argument):
    """Whether this is the moment right before or right after a system call that may change something."""
    if event == ("c_return" if after else "c_call"):
        module = argument.__module__ or type(argument.__self__).__module__
        return module in ("posix", "io", "_io") and argument.__name__ not in QUESTIONS
    return event == ("return" if after else "call") and frame.f_code is output._renameat2.__code__


def watch(step, act, after=False):
    """From now on, count moments before or after system calls, and `act` at the `step`-th; their names."""
    seen = []

    def look(*event):
        if is_step(after, *event):
            seen.append(getattr(event[2], "__name__", event[0].f_code.co_name))
            if len(seen) == step:
                sys.setprofile(None)
                act()

    sys.setprofile(look)
    return seen


def fail_with(error):
    raise error


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file that is opened, and the next step fails
@KINDS
@PLATFORMS
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=repr)
def test_a_failure_at_any_step_leaves_the_old_or_the_new_one_and_nothing_else(tmp_path, kind, force, error):
    seen = Counter()
    for step in itertools.count(1):
        path = tmp_path / str(step) / "out"
        path.parent.mkdir()
        if force:
            kind("old")(path)
        reached = watch(step, functools.partial(fail_with, error), after=isinstance(error, KeyboardInterrupt))
        failed = False
        try:
            kind("new")(path, force=force)
        except (CheckpointError, OSError, type(error)):  # shutil may close twice, an OSError
            failed = True
        finally:
            sys.setprofile(None)
        error.__traceback__ = error.__context__ = None  # which keep frames that are to be cleaned up
        state = content(path)
        assert state == "new" or (failed and state == ("old" if force else None)), (step, failed, state)
        assert list(path.parent.iterdir()) == ([path] if state else []), step
        seen[state] += 1
        if len(reached) < step:
            break
    assert len(seen) == 2
    assert sum(seen.values()) > 10


def test_a_full_disk_is_one_line(tmp_path):
    def write(path, force):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            folder_of("new" * 1000)(path, force=force)
        except CheckpointError as error:
            return str(error)

    folder_of("old")(tmp_path / "out")
    for path, state in ((tmp_path / "new", "nothing was left there"), (tmp_path / "out", "is there is whole")):
        said = forked(lambda path=path: write(path, True))
        assert said.startswith(f"output {path} cannot be written: [Errno 27] File too large; ")
        assert said.endswith(state)
    assert content(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_permission_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match=f"output {tmp_path}/out: no permission to write in {tmp_path}$"):
        folder_of("new")(tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: fail_with(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Permission denied; nothing was left there$"):
        folder_of("new")(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_the_usual_ones(tmp_path, mask):
    before = os.umask(mask)
    try:
        file_of("new")(tmp_path / "out")
        folder = save_converted(*convert(), tmp_path / "checkpoint", fingerprint=False)
    finally:
        os.umask(before)
    for path in (tmp_path / "out", folder, *folder.iterdir()):
        usual = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == usual & ~mask, path


# --- What killed runs left


def test_the_next_run_removes_what_others_left_and_nothing_else(tmp_path):
    kept = [".other.0123abcd.partial", ".out.x.0123abcd.partial", ".out.0123.partial", "out.0123abcd.partial"]
    for name in (".out.0123abcd.partial", ".out.4567abcd.partial", *kept):
        (tmp_path / name / "out").mkdir(parents=True)
    folder_of("new")(tmp_path / "out")
    assert content(tmp_path / "out") == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out", *kept}


@KINDS
@PLATFORMS
def test_of_two_runs_that_write_one_output_at_once_the_later_one_does(tmp_path, kind):
    path = tmp_path / "out"
    kind("old")(path)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*; the one that is there is whole$"):
        kind("first")(path, force=True, between=lambda: kind("later")(path, force=True))
    assert content(path) == "later"
    assert list(tmp_path.iterdir()) == [path]


def ends(pid):
    """The exit code of a child, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.processes
@KINDS
@PLATFORMS
@pytest.mark.parametrize("force", [False, True])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one_and_the_next_run_cleans_up(tmp_path, kind, force):
    path, seen = tmp_path / "out", Counter()
    for step in itertools.count(1):
        if force:
            kind("old")(path)
        if not (pid := os.fork()):
            try:
                watch(step, lambda: os.kill(os.getpid(), signal.SIGKILL))
                kind("new")(path, force=force)
                os._exit(0)
            finally:
                os._exit(1)
        code = ends(pid)
        if output._renameat2 is without_renameat2:
            clean_up(path)  # as the next run does
        state = content(path)
        assert state in ("new", "old" if force else None)
        assert state == "new" or code == -signal.SIGKILL
        seen[state] += 1
        kind("next")(path, force=True)
        assert content(path) == "next"
        assert [each.name for each in tmp_path.iterdir()] == ["out"]
        path.unlink() if path.is_file() else shutil.rmtree(path)
        if code == 0:
            break
    assert len(seen) == 2
    assert sum(seen.values()) > 10
