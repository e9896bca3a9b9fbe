"""Locks of runs, so that no two processes train the same run at the same time.

A lock is a file in the run's folder. It names its owner, the process, which touches the file again
and again while it lives. A lock whose owner is dead is taken over.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..processes import host_name, is_alive

LOCK = "lock"  # name of the file
SECONDS_BETWEEN_TOUCHES = 15.0
SECONDS_UNTIL_STALE = 60.0  # without a touch; then the owner is taken to be dead
SECONDS_TO_SETTLE = 1.0  # in which two processes that take over a lock see one another


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[str | None]:
    """Lock a run's folder until the block ends, unless another process has locked it.

    Args:
        folder: Made if it is missing.
        wait: Wait to see whether another owner of the lock still lives.

    Yields:
        None if this process has the lock now; else the owner of the lock ("HOST-PROCESS").
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    own = f"{host_name()}-{os.getpid()}"
    other_owner = _take_lock(path, own, wait)
    if other_owner is not None:
        yield other_owner
        return
    ended = threading.Event()
    toucher = threading.Thread(target=_touch_until, args=(path, ended), daemon=True)
    toucher.start()
    try:
        yield None
    finally:
        ended.set()
        toucher.join()
        # A process that was suspended for long has lost its lock, and leaves that of another.
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == own:
                path.unlink()


def _take_lock(path: Path, own: str, wait: bool) -> str | None:
    """Take a lock that is free or whose owner is dead; if neither, its owner."""
    try:
        with path.open("x") as file:
            file.write(own)
        return None
    except FileExistsError:
        pass
    try:
        owner = path.read_text()
        if _owner_is_alive(path, owner, wait):
            return owner
        # Others may take over the lock at the same time: the last one to write has it.
        path.write_text(own)
        time.sleep(SECONDS_TO_SETTLE)
        owner = path.read_text()
    except FileNotFoundError:  # its owner has finished the run meanwhile
        return _take_lock(path, own, wait)
    if owner == own:
        return None
    return owner


def _owner_is_alive(path: Path, owner: str, wait: bool) -> bool:
    """Whether the owner of a lock is alive.

    An owner on this machine is dead if no process has its number. Otherwise it counts as alive,
    unless `wait`: then it is alive only if the file's time changes. The change counts, not the
    time, since clocks differ.
    """
    host, _, process = owner.rpartition("-")
    if host == host_name() and process.isdigit() and not is_alive(int(process)):
        return False
    if not wait:
        return True
    touched = path.stat().st_mtime_ns
    waited_until = time.monotonic() + SECONDS_UNTIL_STALE
    while time.monotonic() < waited_until:
        time.sleep(min(1.0, SECONDS_UNTIL_STALE / 10))
        if path.stat().st_mtime_ns != touched:
            return True
    return False


def _touch_until(path: Path, ended: threading.Event) -> None:
    """Touch a lock's file from time to time, until the event."""
    while not ended.wait(SECONDS_BETWEEN_TOUCHES):
        with contextlib.suppress(OSError):
            os.utime(path)
