"""Write outputs that appear whole or not at all.

An output is written in a folder `.NAME.xxxxxxxx.partial` beside its final place, and then renamed.
An older output of the same name is first renamed to `NAME.xxxxxxxx.old`, and removed at the end. A
process that is killed in between may leave these two behind; no later run removes them.

The suffix of a picture, and whether matplotlib is installed, are also checked here, before the
work.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError

from .errors import CheckpointError, DclsConvertError, OutputExistsError, WriteError
from .text import one_line, shortened

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
FIGURE_LIBRARY = "matplotlib"  # in the extra `plot`

# Returns why an existing path must be kept; None if it may be replaced.
WhyKeep = Callable[[Path], str | None]


def check_output_path(path: Path, *, force: bool, why_keep: WhyKeep) -> None:
    """Refuse (CheckpointError) an output before the work, if writing it afterwards would fail.

    Args:
        force: Accept a path that exists, if `why_keep` gives no reason to keep it.
        why_keep: Returns why an existing path must be kept; None if it may be replaced.
    """
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise CheckpointError(
            f"output {path}: begins with ~; give the whole path, as os.path.expanduser does"
        )
    if path.is_symlink() or path.exists():
        reason = why_keep(path)
        if reason is not None:
            raise CheckpointError(f"output {path} {reason}, so it is left as it is; name another")
        if not force:
            raise OutputExistsError(path)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise CheckpointError(f"output {path}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WriteError(f"output {path}: no permission to write in {parent}")


@contextlib.contextmanager
def new_output(output: Path, *, force: bool, why_keep: WhyKeep) -> Iterator[Path]:
    """Yield a path to write a folder or a file to.

    The output gets its final name when the block ends without an error; until then, an existing
    output keeps the name. The block may write more files beside the path: either all get their
    final names, or none.
    """
    check_output_path(output, force=force, why_keep=why_keep)
    folder = output.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder, prefix=f".{output.name}.", suffix=".partial", ignore_cleanup_errors=True
        ) as partial:
            new = Path(partial, output.name)
            yield new
            parts = sorted(part for part in Path(partial).iterdir() if part != new)
            for part in (*parts, new):
                final = output.with_name(part.name)
                check_output_path(final, force=force, why_keep=why_keep)
            _publish([*parts, new], folder, force)
    except (OSError, SafetensorError) as error:
        state = "nothing was left there"
        if os.path.lexists(output):
            state = "the existing one is intact"
        raise WriteError(
            f"output {shortened(output, 200)} cannot be written: {one_line(error)}; {state}"
        ) from error


def _publish(entries: Sequence[Path], folder: Path, force: bool) -> None:
    """Move new files, or one new folder, into a folder; with `force`, replace old ones.

    The last entry is the output itself. If moving it fails, all other moves are undone.
    """
    token = secrets.token_hex(4)
    moves = []
    for new in entries:
        moves.append((new, folder / new.name, folder / f"{new.name}.{token}.old"))
    try:
        for new, final, old in moves:
            if force and os.path.lexists(final):
                final.rename(old)
            new.rename(final)
    finally:
        is_published = not os.path.lexists(entries[-1])
        for new, final, old in moves:
            if is_published and old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            elif is_published:
                old.unlink(missing_ok=True)
            elif os.path.lexists(old):
                os.replace(old, final)
            elif not os.path.lexists(new):
                final.unlink()


def why_not_a_file(path: Path) -> str | None:
    """Return why a path must not be replaced by a file; None for a regular file."""
    if path.is_symlink():
        return "is a link"
    if not path.is_file():
        return "is not a file"
    return None


def check_picture(path: Path) -> None:
    """Refuse (DclsConvertError) a picture of an unsupported suffix, or without matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise DclsConvertError(
            f"--picture {shortened(path, 200)} must end in {', '.join(PICTURE_SUFFIXES)}"
        )
    check_figure_library()


def check_figure_library() -> None:
    """Refuse (DclsConvertError) `--picture` if matplotlib is not installed."""
    if find_spec(FIGURE_LIBRARY) is None:
        raise DclsConvertError(f"--picture needs {FIGURE_LIBRARY}: pip install {FIGURE_LIBRARY}")
