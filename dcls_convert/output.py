"""Outputs that appear whole or not at all, whatever interrupts the writing.

An output is written into a folder `.NAME.xxxxxxxx.partial` beside it, which then takes the output's name or exchanges
names with the old output. The writer holds a lock on that folder until it ends, so the next writer of the same output
knows which folders killed runs left, and removes them.
"""

import _thread
import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import CheckpointError, OutputExistsError, exhausted, one_line, shown

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # flags of Linux's renameat2
AT_FDCWD = -100
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # renameat2's errors if kernel or file system lack it
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # errors of renaming to a name that is in use
PARTIAL = ".{name}.{random}.partial"
MOST_NAME = 255 - len(PARTIAL.format(name="", random="12345678"))  # bytes, where file systems take 255
TRIES_TO_LOCK, SECONDS_A_TRY = 10, 0.01  # where there are no locks, or another run removes the folder meanwhile
SECONDS_A_LOOK = 0.001  # whether a removal has ended
SPARE_DESCRIPTORS = 4  # which the removal of a folder needs, and of a folder in it
SPARE_MEMORY = 2 << 20  # bytes; Python asks the system for 1 MiB at a time

Foreign = Callable[[Path], str | None]  # why an existing path must not be replaced; None where it may be


def check_output(path: Path, *, force: bool, foreign: Foreign) -> None:
    """Refuse an output that could not be written in the end, before any work is done.

    Args:
        path: The folder or file to write.
        force: Something that is there may be replaced, if it is not `foreign`.
        foreign: Says what kind of thing is there, such as "is a link, not a folder".

    Raises:
        CheckpointError: It exists and may not be replaced, or its parent cannot be written.
    """
    try:
        if path.name in ("", ".."):
            raise CheckpointError(f"output {path}: name a new folder, not one that is there already")
        if len(os.fsencode(path.name)) > MOST_NAME:
            raise CheckpointError(f"output {shown(path)}: File name too long; {MOST_NAME} bytes are the most")
        if path.is_symlink() or path.exists():  # which raise OSError for a name that is too long
            if not force:
                raise OutputExistsError(path)
            if reason := foreign(path):
                raise CheckpointError(f"output {path} {reason}, so it is left as it is; name another")
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise CheckpointError(f"output {path}: {parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(f"output {path}: no permission to write in {parent}")
    except OSError as error:
        raise CheckpointError(f"output {shown(path)}: {error.strerror}") from error


@contextlib.contextmanager
def new_folder(folder: Path, *, force: bool, foreign: Foreign) -> Iterator[Path]:
    """A folder to fill. It takes its final name when the block ends well, and vanishes if the block fails.

    With `force` and an old folder there, one of both has the name at every moment, whatever signal comes.

    Raises:
        CheckpointError: As `check_output`, at the start and at the end, or the folder cannot be written.
    """
    with _partial(folder, force, foreign) as partial:
        yield partial
        _sync(partial)
        _check_and_publish(partial, folder, force, foreign)


@contextlib.contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """A path to write to. The file takes its final name when the block ends well, and vanishes if the block fails.

    Other files that the block writes beside it are published before it, each by itself: a kill between two of them
    leaves the new ones beside the old main file. With `force`, regular files may be replaced.

    Raises:
        CheckpointError: As `new_folder`.
    """
    with _partial(path, force, not_a_file) as partial:
        yield partial / path.name
        _sync(partial)
        for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == path.name):
            _check_and_publish(entry, path.with_name(entry.name), force, not_a_file)


def not_a_file(path: Path) -> str | None:
    """Why a path must not be replaced by a file; None for a regular file."""
    return "is a link" if path.is_symlink() else None if path.is_file() else "is not a file"


@contextlib.contextmanager
def _partial(output: Path, force: bool, foreign: Foreign) -> Iterator[Path]:
    """A locked folder beside the output, whose missing parents are made. Both vanish again if the block fails."""
    clean_up(output)
    check_output(output, force=force, foreign=foreign)
    parent = output.absolute().parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    partial = parent / PARTIAL.format(name=output.name, random=secrets.token_hex(4))
    lock: list[int] = []
    try:
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(_remove, partial, missing)
            parent.mkdir(parents=True, exist_ok=True)
            _make_locked(partial, lock)
            _keep_spare(cleaning, lock)
            yield partial
            missing.clear()
    except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
        stays = os.path.lexists(partial)
        if not isinstance(error, OSError | SafetensorError) and not (stays and exhausted(error)):
            raise
        left = [f"{partial} is left there"] if stays else []
        left += ["the one that is there is whole"] if os.path.lexists(output) else []
        state = " and ".join(left) or "nothing was left there"
        why = exhausted(error) or one_line(error)
        raise CheckpointError(f"output {shown(output, 200)} cannot be written: {why}; {state}") from error
    finally:
        _remove(partial, missing)  # again, since a second signal may have cut the first removal short
        if os.path.lexists(output):
            _remove(_old_of(partial), [])
        for descriptor in lock:
            with contextlib.suppress(OSError):  # the error above says more
                os.close(descriptor)


def clean_up(output: Path) -> None:
    """Remove what killed runs left beside this output, and give an old output its name back if it lost it.

    A folder of a run that is still alive is locked, and stays. Where the platform has no locks, all stay.
    """
    pattern = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    with contextlib.suppress(OSError):
        for entry in sorted(output.absolute().parent.iterdir()):
            found = pattern.fullmatch(entry.name)
            if found is None or not entry.is_dir() or entry.is_symlink():
                continue
            for descriptor in _lock(entry):
                if found[1] == "old" and not os.path.lexists(output):
                    entry.rename(output)
                else:
                    shutil.rmtree(entry, ignore_errors=True)
                os.close(descriptor)


def _make_locked(folder: Path, lock: list[int]) -> None:
    """Make a folder, and add its lock. Another run's `clean_up` may remove it before; then it is made again."""
    for _ in range(TRIES_TO_LOCK):
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            found = _lock(folder)
            lock.extend(found)
            if found and folder.exists():
                return
        time.sleep(SECONDS_A_TRY)


def _keep_spare(cleaning: contextlib.ExitStack, lock: list[int]) -> None:
    """Hold descriptors and memory until the cleaning, which needs some where the work has taken all that there was."""
    cleaning.enter_context(mmap.mmap(-1, SPARE_MEMORY))
    for descriptor in lock * SPARE_DESCRIPTORS:
        cleaning.callback(os.close, os.dup(descriptor))


def _lock(folder: Path) -> list[int]:
    """A descriptor that holds the lock of a folder until it is closed; none where another process has it."""
    try:
        import fcntl
    except ImportError:  # not on this platform
        return []
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return []
    return [descriptor]


def _remove(folder: Path, parents: list[Path]) -> None:
    """Remove a folder with all that it holds, and then the empty parents.

    In a thread: Python's signal handlers run in the main thread alone, so no second Ctrl-C stops this half-way. An
    interrupt inside `threading.Thread.start` could leave both threads waiting for ever; `_thread` has no such place.
    """
    removing = [True]

    def remove() -> None:
        try:
            with contextlib.suppress(MemoryError):
                shutil.rmtree(folder, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError, MemoryError):
                    parent.rmdir()
        finally:
            removing.clear()

    def wait() -> None:
        while removing:
            time.sleep(SECONDS_A_LOOK)

    if os.path.lexists(folder) or parents:
        try:
            _thread.start_new_thread(remove, ())
        except (RuntimeError, MemoryError):  # the system gives no thread
            remove()
        try:
            wait()
        except BaseException:
            wait()
            raise


def _sync(folder: Path) -> None:
    """Have the disk hold a folder and its files, so that a power cut after the renaming finds them whole."""
    for path in (*folder.iterdir(), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_and_publish(new: Path, output: Path, force: bool, foreign: Foreign) -> None:
    check_output(output, force=force, foreign=foreign)
    try:
        _publish(new, output, force=force)
    except OutputExistsError:  # another run wrote it since the check
        if not force:
            raise
        check_output(output, force=force, foreign=foreign)
        _publish(new, output, force=force)


def _publish(new: Path, output: Path, *, force: bool) -> None:
    """Give a new file or folder its final name. With `force`, what is there keeps the name until then."""
    replaces = force and os.path.lexists(output)
    try:
        if replaces and new.is_file():
            os.replace(new, output)
        elif not _rename(new, output, RENAME_EXCHANGE if replaces else RENAME_NOREPLACE):
            _replace_by_steps(new, output) if replaces else _rename_new(new, output)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise OutputExistsError(output, " (it appeared meanwhile)") from error
    _fsync(output.absolute().parent)


def _rename(new: Path, output: Path, flag: int) -> bool:
    """Linux's renameat2; False where there is none, and OSError as `os.rename`."""
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if not renameat2(AT_FDCWD, os.fsencode(new.absolute()), AT_FDCWD, os.fsencode(output.absolute()), flag):
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(output))


def _rename_new(new: Path, output: Path) -> None:
    """Without renameat2. A file cannot be renamed without the risk of replacing another, but linked it can."""
    if new.is_file():
        os.link(new, output)
        new.unlink()
    elif os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
    else:
        new.rename(output)


def _replace_by_steps(new: Path, folder: Path) -> None:
    """Without renameat2: two renames. If a kill falls between them, the next run's `clean_up` undoes the first."""
    old = _old_of(new)
    try:
        folder.rename(old)
        new.rename(folder)
    finally:
        if not os.path.lexists(folder):
            old.rename(folder)
        _remove(old, [])


def _old_of(partial: Path) -> Path:
    """Where an old folder is meanwhile, without renameat2."""
    return partial.with_suffix(".old")
