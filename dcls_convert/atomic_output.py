"""Write outputs that appear whole or not at all.

An output is written in a folder `.NAME.HOST-PID.xxxxxxxx.partial` beside it, and then renamed.
"""

import contextlib
import ctypes
import errno
import glob
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

from .errors import CheckpointError, OutputExistsError
from .process_identity import host_name, is_alive
from .text import one_line, shortened

# Flags of Linux's renameat2.
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
AT_FDCWD = -100
# Errors of renameat2 if the kernel or the file system does not support it.
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
# Age at which a partial folder of another host counts as left over. Whether its process is still
# running cannot be checked from here.
SECONDS_UNTIL_LEFT_OVER = 24 * 3600
PARTIAL_ENDING = re.compile(r"(?P<host>[A-Za-z0-9-]*)-(?P<pid>\d+)\.[0-9a-f]{8}\.partial")
OLD = ".old"  # suffix of the old output inside the partial folder, without renameat2

# Returns why an existing path must be kept; None if it may be replaced.
ReasonToKeep = Callable[[Path], str | None]


def check_output(path: Path, *, force: bool, reason_to_keep: ReasonToKeep) -> None:
    """Refuse (CheckpointError) an output that could not be written when the work is done.

    Args:
        force: Accept a path that exists, if `reason_to_keep` gives no reason to keep it.
        reason_to_keep: Returns why an existing path must be kept; None if it may be replaced.
    """
    try:
        if path.name in ("", ".."):
            raise CheckpointError(
                f"output {path}: name a new folder, not one that is there already"
            )
        # For a name that is too long, `is_symlink` and `exists` raise OSError.
        if path.is_symlink() or path.exists():
            # Without `force`, do not look into folders: that may need slow imports.
            reason = reason_to_keep(path) if force or not path.is_dir() else None
            if reason:
                raise CheckpointError(
                    f"output {path} {reason}, so it is left as it is; name another"
                )
            if not force:
                raise OutputExistsError(path)
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise CheckpointError(f"output {path}: {parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(f"output {path}: no permission to write in {parent}")
    except OSError as error:
        raise CheckpointError(f"output {shortened(path)}: {error.strerror}") from error


@contextlib.contextmanager
def new_folder(folder: Path, *, force: bool, reason_to_keep: ReasonToKeep) -> Iterator[Path]:
    """Yield a folder to fill; it gets its final name when the block ends without an error.

    Until then, an existing folder keeps the name.
    """
    with _partial(folder, force, reason_to_keep) as new:
        new.mkdir()
        yield new


def new_file(path: Path, *, force: bool) -> contextlib.AbstractContextManager[Path]:
    """Return a context manager that yields a path to write to.

    The file gets its final name when the block ends without an error. Other files that the block
    writes beside it are published before it.
    """
    return _partial(path, force, reason_not_a_file)


def reason_not_a_file(path: Path) -> str | None:
    """Return why a path must not be replaced by a file; None for a regular file."""
    if path.is_symlink():
        return "is a link"
    if not path.is_file():
        return "is not a file"
    return None


def clean_up(output: Path) -> None:
    """Remove the partial folders that ended or killed runs left beside this output.

    If such a run had moved the old output away, the old output gets its name back.
    """
    with contextlib.suppress(OSError):
        beginning = f".{output.name}."
        for entry in sorted(output.absolute().parent.glob(f"{glob.escape(beginning)}*")):
            owner = PARTIAL_ENDING.fullmatch(entry.name.removeprefix(beginning))
            if owner is None or _may_be_in_use(entry, owner["host"], int(owner["pid"])):
                continue
            old = entry / (output.name + OLD)
            if os.path.lexists(old) and not os.path.lexists(output):
                old.rename(output)
            # Rename first: if that process is still running after all, it then publishes nothing,
            # rather than a part.
            shutil.rmtree(entry.rename(_new_partial(output)), ignore_errors=True)


def _new_partial(output: Path) -> Path:
    name = f".{output.name}.{host_name()}-{os.getpid()}.{secrets.token_hex(4)}.partial"
    return output.absolute().with_name(name)


def _may_be_in_use(partial: Path, host: str, pid: int) -> bool:
    """True if the process that made a partial folder may still be writing there."""
    if host == host_name() and sys.platform != "win32":  # on Windows, os.kill would end the process
        return is_alive(pid)
    return time.time() - partial.stat().st_mtime < SECONDS_UNTIL_LEFT_OVER


@contextlib.contextmanager
def _partial(output: Path, force: bool, reason_to_keep: ReasonToKeep) -> Iterator[Path]:
    """Yield a path in a partial folder beside the output.

    Everything in the folder is published when the block ends without an error.
    """
    clean_up(output)
    check_output(output, force=force, reason_to_keep=reason_to_keep)
    partial = _new_partial(output)
    try:
        try:
            partial.mkdir(parents=True)
            yield partial / output.name
            # The output itself is published last.
            for entry in sorted(partial.iterdir(), key=lambda entry: entry.name == output.name):
                _publish(entry, output.with_name(entry.name), force, reason_to_keep)
        except (OSError, SafetensorError) as error:
            state = "nothing was left there"
            if os.path.lexists(output):
                state = "the existing one is intact"
            raise CheckpointError(
                f"output {shortened(output, 200)} cannot be written: {one_line(error)}; {state}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        # Again, since a signal may have cut the first removal short.
        shutil.rmtree(partial, ignore_errors=True)


def _publish(new: Path, output: Path, force: bool, reason_to_keep: ReasonToKeep) -> None:
    """Give a new file or folder its final name.

    With `force`, an existing file or folder keeps the name until then.
    """
    check_output(output, force=force, reason_to_keep=reason_to_keep)
    replaces = force and os.path.lexists(output)
    flag = RENAME_EXCHANGE if replaces else RENAME_NOREPLACE
    try:
        if replaces and new.is_file():
            os.replace(new, output)
        elif not _renameat2(new, output, flag):
            _publish_without_renameat2(new, output, replaces)
    except FileExistsError:  # the output appeared after the check, so check again
        _publish(new, output, force, reason_to_keep)


def _publish_without_renameat2(new: Path, output: Path, replaces: bool) -> None:
    if replaces:
        _replace_by_steps(new, output)
    elif new.is_file():
        os.link(new, output)  # unlike a rename, never replaces another file
    elif os.path.lexists(output):
        raise FileExistsError
    else:
        new.rename(output)


def _replace_by_steps(new: Path, output: Path) -> None:
    """Replace a path by two renames.

    If the process is killed between them, the next run's `clean_up` undoes the first.
    """
    old = new.with_name(new.name + OLD)
    try:
        output.rename(old)
        new.rename(output)
    finally:
        if not os.path.lexists(output):
            old.rename(output)


def _renameat2(new: Path, output: Path, flag: int) -> bool:
    """Exchange two paths, or rename to a path that must not exist, by Linux's system call.

    Returns:
        False if the system call is not available.

    Raises:
        OSError: The call failed, for the reasons for which `os.rename` fails.
    """
    if sys.platform != "linux":
        return False
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    new_path = os.fsencode(new.absolute())
    output_path = os.fsencode(output.absolute())
    if renameat2(AT_FDCWD, new_path, AT_FDCWD, output_path, flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(output))
