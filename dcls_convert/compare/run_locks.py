"""Locks of runs, so that no two processes train the same run at the same time.

A lock is a file in the run's folder that names the process that owns it. The owner touches the file
regularly while it is alive. A lock whose owner is dead is taken over.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..process_identity import host_name, is_alive

LOCK_FILE = "lock"  # file name
SECONDS_BETWEEN_TOUCHES = 15.0
SECONDS_UNTIL_STALE = 60.0  # without a touch, after which the owner counts as dead
SECONDS_TO_SETTLE = 1.0  # time for two processes that take over the same lock to see each other


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[str | None]:
    """Lock a run's folder until the block ends, unless another process has locked it.

    Args:
        folder: Made if it is missing.
        wait: If the lock has an owner, wait to see whether the owner is still alive.

    Yields:
        None if this process now has the lock; otherwise its owner ("HOST-PROCESS").
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
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
        # If this process was suspended for long, another one may have taken over the lock.
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == own:
                path.unlink()


def _take_lock(path: Path, own: str, wait: bool) -> str | None:
    """Take the lock if it is free or its owner is dead, and return None; else return its owner."""
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
        # Others may take over the lock at the same time. The last one to write gets it.
        path.write_text(own)
        time.sleep(SECONDS_TO_SETTLE)
        owner = path.read_text()
    except FileNotFoundError:  # its owner has finished the run in the meantime
        return _take_lock(path, own, wait)
    if owner == own:
        return None
    return owner


def _owner_is_alive(path: Path, owner: str, wait: bool) -> bool:
    """True if the owner of a lock is alive.

    An owner on this machine is dead if its process no longer exists. Any other owner counts as
    alive; with `wait`, only if it touches the file in the meantime. Modification times are compared
    only with one another, since the clocks of hosts differ.
    """
    host, _, process = owner.rpartition("-")
    if host == host_name() and process.isdigit() and not is_alive(int(process)):
        return False
    if not wait:
        return True
    last_touch = path.stat().st_mtime_ns
    deadline = time.monotonic() + SECONDS_UNTIL_STALE
    while time.monotonic() < deadline:
        time.sleep(min(1.0, SECONDS_UNTIL_STALE / 10))
        if path.stat().st_mtime_ns != last_touch:
            return True
    return False


def _touch_until(path: Path, ended: threading.Event) -> None:
    """Touch the file of a lock regularly until the event is set."""
    while not ended.wait(SECONDS_BETWEEN_TOUCHES):
        with contextlib.suppress(OSError):
            os.utime(path)
