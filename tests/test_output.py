"""Outputs appear whole or not at all: what is refused, what is replaced, and what a failure leaves."""

import _thread
import contextlib
import functools
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dcls_convert import output, save_converted
from dcls_convert.checkpoints.folder import not_of_a_checkpoint
from dcls_convert.errors import CheckpointError
from dcls_convert.output import check_output, new_file, new_folder

from .campaigns.forks import forked
from .checkpoints.folders import convert


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
    return (path / "file" if path.is_dir() else path).read_text()


@pytest.fixture(params=["renameat2", "without it"])
def _platform(request, monkeypatch):
    """With and without the system call that exchanges two names."""
    if request.param != "renameat2":
        monkeypatch.setattr(output, "_rename", lambda *_: False)


KINDS = pytest.mark.parametrize("kind", [folder_of, file_of])


@KINDS
@pytest.mark.usefixtures("_platform")
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
@pytest.mark.usefixtures("_platform")
@pytest.mark.parametrize("appears", [folder_of, file_of])
@pytest.mark.parametrize("late", [False, True])
def test_what_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch, kind, appears, late):
    """Neither where the last look finds it, nor where it comes between that look and the renaming."""
    path = tmp_path / "out"
    publish = output._publish
    if late:

        def after_the_look(new, target, *, force):
            monkeypatch.setattr(output, "_publish", publish)
            appears("theirs")(path)
            publish(new, target, force=force)

        monkeypatch.setattr(output, "_publish", after_the_look)
    with pytest.raises(CheckpointError, match="already exists"):
        kind("ours")(path, between=(lambda: None) if late else lambda: appears("theirs")(path))
    assert content(path) == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_a_signal_during_the_removal_of_the_old_folder_leaves_nothing(tmp_path, monkeypatch):
    """Without the system call, the old folder has a name of its own meanwhile."""
    folder_of("old")(tmp_path / "out")
    remove, removed = output._remove, []

    def interrupted_once(folder, parents):
        if folder.suffix == ".old" and not removed:
            removed.append(folder)
            raise KeyboardInterrupt
        remove(folder, parents)

    monkeypatch.setattr(output, "_rename", lambda *_: False)
    monkeypatch.setattr(output, "_remove", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        folder_of("new")(tmp_path / "out", force=True)
    assert removed
    assert content(tmp_path / "out") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@KINDS
def test_what_appears_in_the_last_moment_is_replaced_by_force(tmp_path, monkeypatch, kind):
    rename = output._rename

    def later(new, path, flag):
        monkeypatch.setattr(output, "_rename", rename)
        kind("another run's")(path)
        return rename(new, path, flag)

    monkeypatch.setattr(output, "_rename", later)
    kind("new")(tmp_path / "out", force=True)
    assert content(tmp_path / "out") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_during_a_save_is_not_overwritten(tmp_path, monkeypatch):
    model, plan = convert()
    sync = output._sync

    def and_then(partial):
        sync(partial)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(output, "_sync", and_then)
    with pytest.raises(CheckpointError, match="already exists"):
        save_converted(model, plan, tmp_path / "out", fingerprint=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_force_replaces_nothing_but_checkpoint_folders(tmp_path):
    model, plan = convert()
    folder = save_converted(model, plan, tmp_path / "out", fingerprint=False)
    save_converted(model, plan, folder, force=True, fingerprint=False)
    (folder / "my_notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"my_notes\.txt"):
        save_converted(model, plan, folder, force=True, fingerprint=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not a folder"):
        check_output(tmp_path / "file" / "out", force=False, foreign=not_of_a_checkpoint)


@KINDS
@pytest.mark.usefixtures("_platform")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("bug")])
def test_a_failure_leaves_nothing_and_the_old_one_as_it_was(tmp_path, kind, error):
    kind("old")(tmp_path / "out")

    def fail():
        raise error

    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised:
        kind("new")(tmp_path / "out", force=True, between=fail)
    assert "nothing was left there" not in str(raised.value)  # the old one is there
    with pytest.raises(expected) as raised:
        kind("new")(tmp_path / "new" / "out", between=fail)
    assert ("nothing was left there" in str(raised.value)) is isinstance(error, OSError)
    assert content(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_failure_leaves_nothing_where_no_thread_can_be_started(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise error

    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output._thread, "start_new_thread", refuse)
    with pytest.raises(CheckpointError, match="nothing was left there"):
        folder_of("new")(tmp_path / "deep" / "out", between=fail)
    assert list(tmp_path.iterdir()) == []


def take_all_descriptors(kept):
    with contextlib.suppress(OSError):
        while True:
            kept.append(os.dup(0))
    raise MemoryError


def take_all_memory(kept):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (8 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for size in (1 << 20, 1 << 14, 1 << 10, 100):
        with contextlib.suppress(MemoryError):
            while True:
                kept = [kept, bytearray(size)]  # an error keeps what its frames hold
    raise MemoryError


@KINDS
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
@pytest.mark.parametrize("take", [take_all_descriptors, take_all_memory])
def test_a_failure_leaves_nothing_where_the_work_took_all_there_is(tmp_path, kind, take):
    def starved():
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        kept = []
        try:
            kind("new")(tmp_path / "deep" / "out", between=lambda: take(kept))
        except MemoryError:
            return "out of memory"

    assert forked(starved) == "out of memory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")], ids=repr)
def test_a_failure_that_cannot_clean_up_says_what_is_left_and_the_next_run_removes_it(tmp_path, monkeypatch, error):
    def fail():
        raise error

    def refuse(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(output.shutil, "rmtree", refuse)
        with pytest.raises(CheckpointError, match=r"out of memory; .*\.partial is left there"):
            folder_of("new")(tmp_path / "out", between=fail)
    assert len(list(tmp_path.iterdir())) == 1
    folder_of("new")(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(output.shutil, "rmtree", refuse)
        with pytest.raises(CheckpointError, match=r"\.partial is left there and the one that is there is whole"):
            folder_of("new")(tmp_path / "out", between=fail, force=True)
    folder_of("new")(tmp_path / "out", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@KINDS
def test_the_disk_has_everything_before_the_name_changes(tmp_path, monkeypatch, kind):
    events = []
    fsync, rename = os.fsync, output._rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(output, "_rename", lambda *args: events.append("rename") or rename(*args))
    kind("new")(tmp_path / "out")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {Path(path).suffix for path in before} >= {".partial"}
    assert any(Path(path).name in ("file", "out") for path in before)
    assert after == [str(tmp_path)]


@KINDS
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_the_usual_ones(tmp_path, kind, mask):
    before = os.umask(mask)
    try:
        kind("new")(tmp_path / "out")
        model, plan = convert()
        folder = save_converted(model, plan, tmp_path / "checkpoint", fingerprint=False)
    finally:
        os.umask(before)
    for path in (tmp_path / "out", folder, *folder.iterdir()):
        usual = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == usual & ~mask, path


# --- What killed runs left

HOLD = """
import sys, time
from pathlib import Path
from dcls_convert.output import new_folder
with new_folder(Path(sys.argv[1]), force=True, foreign=lambda path: None) as partial:
    (partial / "file").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def holding(path):
    """A process that has begun to write the output."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_next_run_removes_what_killed_runs_left_and_nothing_of_a_living_one(tmp_path):
    with holding(tmp_path / "out") as alive, holding(tmp_path / "out") as killed:
        killed.kill()
        killed.wait()
        others = [tmp_path / name for name in (".out.x.0123abcd.partial", ".out.01.partial", ".other.0123abcd.partial")]
        for path in others:
            path.mkdir()
        assert len(list(tmp_path.glob(".out.????????.partial"))) == 2
        folder_of("new")(tmp_path / "out")
        (left,) = tmp_path.glob(".out.????????.partial")
        alive.kill()
    assert (left / "file").read_text() == "half"
    assert all(path.is_dir() for path in others)
    folder_of("newer")(tmp_path / "out", force=True)
    assert not list(tmp_path.glob(".out.????????.partial"))
    assert content(tmp_path / "out") == "newer"


@pytest.mark.parametrize("moment", ["before the lock", "once it is opened"])
def test_a_new_folder_that_another_run_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch, moment):
    lock, cleaned = output._lock, []

    def slow_lock(folder):
        if cleaned:
            return lock(folder)
        cleaned.append(folder)
        if moment == "before the lock":
            output.clean_up(tmp_path / "out")
            return lock(folder)
        with open_folder(folder) as descriptor:
            output.clean_up(tmp_path / "out")
            return [os.dup(descriptor)]

    monkeypatch.setattr(output, "_lock", slow_lock)
    folder_of("new")(tmp_path / "out")
    assert content(tmp_path / "out") == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@contextlib.contextmanager
def open_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_an_old_folder_that_lost_its_name_gets_it_back(tmp_path):
    """Without renameat2, a kill between the two renames leaves it so."""
    folder_of("old")(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.0123abcd.old")
    output.clean_up(tmp_path / "out")
    assert content(tmp_path / "out") == "old"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_the_cleaning_leaves_nothing(tmp_path, monkeypatch, second):
    removing = threading.Event()
    rmtree = output.shutil.rmtree

    def slowly(*args, **options):
        removing.set()
        time.sleep(0.3)
        rmtree(*args, **options)

    def interrupt(*_):
        raise KeyboardInterrupt

    def again():
        removing.wait()
        os.kill(os.getpid(), second)

    monkeypatch.setattr(output.shutil, "rmtree", slowly)
    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, second)}
    thread = threading.Thread(target=again)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            folder_of("new")(tmp_path / "out", between=lambda: signal.raise_signal(signal.SIGINT))
    finally:
        thread.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert list(tmp_path.iterdir()) == []


def interrupted_at(turn, work):
    """Interrupt the work after its `turn`-th call of C code, where Python runs a signal's handler; whether it was."""
    seen = 0

    def watch(_frame, event, _argument):
        nonlocal seen
        seen += event == "c_return"
        if seen == turn:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_anywhere_in_the_removal_leaves_no_thread_that_waits(tmp_path):
    """The removal is done again, as at the end of each writing."""
    before, deadline = _thread._count(), time.monotonic() + 10
    for turn in range(1, 200):
        folder = tmp_path / str(turn)  # the one before may still be in the hands of a thread
        folder.mkdir()
        (folder / "file").touch()
        interrupted = interrupted_at(turn, functools.partial(output._remove, folder, []))
        output._remove(folder, [])
        assert not folder.exists()
        if not interrupted:
            break
    assert turn > 2
    assert not interrupted
    while _thread._count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
