"""Outputs appear whole or not at all: what is refused, what is replaced, and what a failure or a
kill leaves.
"""

import errno
import functools
import itertools
import os
import re
import signal
import sys
from collections import Counter

import pytest

from dcls_convert import save_converted
from dcls_convert.errors import CheckpointError
from dcls_convert.output import new_output, why_not_a_file

from .checkpoints.folders import convert


def folder_writer(text):
    """Return a function that writes a new folder, with a file that holds the text."""

    def fill(path):
        path.mkdir()
        (path / "file").write_text(text)

    return writer(fill, lambda _: None)


def file_writer(text):
    """Return a function that writes a file that holds the text."""
    return writer(lambda path: path.write_text(text), why_not_a_file)


def writer(fill, why_keep):
    def write(path, *, force=False, between=lambda: None):
        with new_output(path, force=force, why_keep=why_keep) as partial:
            fill(partial)
            between()

    return write


def content(path):
    """Return the text that was written to the path; None if nothing was."""
    if path.is_dir():
        path = path / "file"
    return path.read_text() if path.exists() else None


KINDS = pytest.mark.parametrize("kind", [folder_writer, file_writer])


@KINDS
def test_what_is_there_is_replaced_by_force_alone(tmp_path, kind):
    path = tmp_path / "deep" / "er" / "out"
    kind("old")(path)
    with pytest.raises(CheckpointError, match="out already exists; name another, or replace it"):
        kind("new")(path)
    assert content(path) == "old"
    kind("new")(path, force=True)
    assert content(path) == "new"
    assert list(path.parent.iterdir()) == [path]


@KINDS
@pytest.mark.parametrize("force", [False, True])
def test_what_appears_meanwhile_is_replaced_by_force_alone(tmp_path, kind, force):
    path = tmp_path / "out"

    def write_theirs():
        theirs = path / "file" if kind is folder_writer else path
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("theirs")

    if force:
        kind("ours")(path, force=True, between=write_theirs)
    else:
        with pytest.raises(CheckpointError, match="already exists"):
            kind("ours")(path, between=write_theirs)
    assert content(path) == ("ours" if force else "theirs")
    assert list(tmp_path.iterdir()) == [path]


READ_ONLY_CALLS = ("fspath", "stat", "lstat", "fstat", "is_dir", "access", "getpid")


def is_step(after, frame, event, argument):
    """True if the event is right before (or right `after`) a system call that may change files."""
    if event != ("c_return" if after else "c_call"):
        return False
    module = argument.__module__ or type(argument.__self__).__module__
    return module in ("posix", "io", "_io") and argument.__name__ not in READ_ONLY_CALLS


def fail_with(error):
    raise error


def end_at_step(write, step, act, after=False):
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


def fill_disk(write, step):
    return end_at_step(write, step, lambda: fail_with(FULL))


def interrupt(write, step):
    return end_at_step(write, step, lambda: fail_with(KeyboardInterrupt()), after=True)


def kill(write, step):
    """End another process by SIGKILL."""
    if not (pid := os.fork()):
        try:
            end_at_step(write, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(0)
    was_killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
    return was_killed, was_killed


FULL = OSError(errno.ENOSPC, "No space left")


# A file that was opened stays open if the next step fails.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@KINDS
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "end", [fill_disk, interrupt, pytest.param(kill, marks=pytest.mark.processes)]
)
def test_whatever_ends_a_run_at_any_step_leaves_the_old_or_the_new_one(tmp_path, kind, force, end):
    """What is left beside it, where even removing was stopped, has a name that says what it is.
    After a kill, that may be the old one.
    """
    states = Counter()
    for step in itertools.count(1):
        path = tmp_path / str(step) / "out"
        path.parent.mkdir()
        if force:
            kind("old")(path)
        reached, failed = end(functools.partial(kind("new"), path, force=force), step)
        state = content(path)
        if end is kill and state is None:
            for old in path.parent.glob("out.*.old"):
                state = content(old)
        may_be = {"new", "old" if force else None} if failed else {"new"}
        assert state in may_be, step
        for entry in path.parent.iterdir():
            assert re.fullmatch(r"out|\.out\..*\.partial|out\..*\.old", entry.name), step
        states[state] += 1
        if not reached:
            break
    assert len(states) == 2
    assert sum(states.values()) > 10


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("end", [fill_disk, interrupt])
def test_a_file_and_its_second_file_are_both_old_or_both_new(tmp_path, force, end):
    """As an ONNX model and its weights, which are wrong beside another one."""

    def write(text, path, force=False):
        with new_output(path, force=force, why_keep=why_not_a_file) as partial:
            partial.write_text(text)
            partial.with_name(f"{partial.name}.data").write_text(text)

    states = Counter()
    for step in itertools.count(1):
        path = tmp_path / str(step) / "out"
        if force:
            write("old", path)
        reached, _ = end(functools.partial(write, "new", path, force=force), step)
        state = content(path)
        assert content(path.with_name("out.data")) == state, step
        states[state] += 1
        if not reached:
            break
    assert set(states) == {"new", "old" if force else None}


@KINDS
def test_a_full_disk_is_one_line_and_leaves_nothing_else(tmp_path, kind):
    kind("old")(tmp_path / "out")
    for path, state in (
        (tmp_path / "new", "nothing was left there"),
        (tmp_path / "out", "the existing one is intact"),
    ):
        says = f"^output {path} cannot be written: .*No space left.*; {state}$"
        with pytest.raises(CheckpointError, match=says):
            kind("new")(path, force=True, between=lambda: fail_with(FULL))
    assert content(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_permission_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match=f"out: no permission to write in {tmp_path}$"):
        folder_writer("new")(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_permissions_are_the_usual_ones(tmp_path):
    folder = save_converted(*convert(), tmp_path / "checkpoint", check=False)
    (tmp_path / "usual").touch()
    (tmp_path / "usual folder").mkdir()
    for path in (folder, *folder.iterdir()):
        usual = tmp_path / ("usual folder" if path.is_dir() else "usual")
        assert path.stat().st_mode == usual.stat().st_mode, path
