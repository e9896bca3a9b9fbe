"""Which process trains a run, so that no other one trains it at the same time.

A claim is a file in the run's folder. It names the process, which touches it while it lives.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..output import host_name, is_alive

CLAIM = "claim"  # name of the file
SECONDS_BETWEEN_BEATS = 15.0  # after which the file is touched again
SECONDS_UNTIL_STALE = 60.0  # without a touch, the process is taken to be dead
SECONDS_TO_SETTLE = 1.0  # in which two processes that take over a claim see one another


@contextlib.contextmanager
def claimed(folder: Path, *, patient: bool) -> Iterator[str | None]:
    """Claim a run's folder until the block ends.

    Args:
        folder: Made if it is missing.
        patient: Wait to see whether the process that has claimed the folder still lives.

    Yields:
        None; or the owner ("HOST-PROCESS") of the claim of another process that lives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CLAIM
    own = f"{host_name()}-{os.getpid()}"
    owner = _owner_after_taking(path, own, patient)
    if owner is not None:
        yield owner
        return
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    beats.start()
    try:
        yield None
    finally:
        ended.set()
        beats.join()
        path.unlink(missing_ok=True)


def _owner_after_taking(path: Path, own: str, patient: bool) -> str | None:
    """Take the claim if it is free or its process is dead; else its owner."""
    try:
        with path.open("x") as file:
            file.write(own)
        return None
    except FileExistsError:
        pass
    try:
        owner = path.read_text()
        if _lives(path, owner, patient):
            return owner
        # Others may take the dead process's claim at the same time: the last one to write has it.
        path.write_text(own)
        time.sleep(SECONDS_TO_SETTLE)
        owner = path.read_text()
    except FileNotFoundError:  # the run has ended meanwhile
        return _owner_after_taking(path, own, patient)
    if owner == own:
        return None
    return owner


def _lives(path: Path, owner: str, patient: bool) -> bool:
    """Whether the owner of a claim still lives.

    It is dead if it is of this machine, and no process here has its number. Otherwise it may live:
    it is on another machine, or its number may be that of another process by now. Without
    `patient`, it is then taken to live. With it, the claim's file tells: clocks may differ, so only
    a change of the file's time says that the owner lives.
    """
    host, _, process = owner.rpartition("-")
    if host == host_name() and process.isdigit() and not is_alive(int(process)):
        return False
    if not patient:
        return True
    touched = path.stat().st_mtime_ns
    waited_until = time.monotonic() + SECONDS_UNTIL_STALE
    while time.monotonic() < waited_until:
        time.sleep(min(1.0, SECONDS_UNTIL_STALE / 10))
        if path.stat().st_mtime_ns != touched:
            return True
    return False


def _beat(path: Path, ended: threading.Event) -> None:
    """Touch a claim until the block that holds it ends."""
    while not ended.wait(SECONDS_BETWEEN_BEATS):
        with contextlib.suppress(OSError):
            os.utime(path)
