"""Check input files and folders before they are loaded, and find the built-in rule sets.

Imports no torch.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError, DclsConvertError
from .text import shortened

SHIPPED_RULES = Path(__file__).parent / "rules"  # if installed from a wheel
CHECKOUT_RULES = Path(__file__).parents[1] / "rules"
SAFETENSORS_SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".tar")  # usual ones of files of torch.save
# Suffixes of the image files that are read.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")
# Folders, in lower case, in which systems and archives keep copies, deleted files, and files of
# their own.
SYSTEM_FOLDERS = frozenset(
    {
        "#recycle",
        "$recycle.bin",
        "@eadir",
        "__macosx",
        "lost+found",
        "system volume information",
    }
)

# Matches a URL that was turned into a Path, which collapses `//` to `/`. The scheme has at least
# two letters, so that Windows drives do not match.
URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)", re.DOTALL)

MAX_TEXT_BYTES = 64 << 20  # bytes; the report of timm's largest model has half a megabyte


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: Not a regular file (a pipe or a device might never end), or too large.
    """
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "is not a file")
    if state.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"has {state.st_size:,} bytes; at most {max_bytes:,} are read")
    return path.read_bytes()


def builtin_rules() -> dict[str, Path]:
    """Return the paths of the rule sets that come with the package, by name."""
    folder = SHIPPED_RULES if SHIPPED_RULES.is_dir() else CHECKOUT_RULES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def check_file(path: Path, what: str = "checkpoint") -> None:
    """Check that there is a file.

    Raises:
        CheckpointError: There is none. The message begins with `what` (which may be "") and the
            path.
    """
    try:
        if not path.is_file():
            url = URL.fullmatch(path.as_posix())
            if url is not None:
                address = shortened(f"{url[1]}://{url[2]}", 200)
                message = f"{address}: download it first; URLs are not read"
                raise CheckpointError(_with_prefix(what, message))
            problem = "there is no such file"
            if path.exists():
                problem = "is not a file; name the file of the weights"
            elif path.is_symlink():
                problem = "is a broken link"
            raise CheckpointError(_with_prefix(what, f"{path}: {problem}"))
    except OSError as error:
        raise CheckpointError(_with_prefix(what, f"{shortened(path)}: {error.strerror}")) from error


def _with_prefix(what: str, message: str) -> str:
    """Return the message with `what`, which may be "", in front of it."""
    return f"{what} {message}".lstrip()


def check_folder(path: Path) -> Path:
    """Return the path of a checkpoint if it is a folder, else raise CheckpointError."""
    if path.is_dir():
        return path
    cure = "convert a model first, and name the folder that was written"
    if path.is_file():
        cure = (
            "to store trained weights, load them into the folder's model, and call save_converted"
        )
    raise CheckpointError(f"{shortened(path, 200)}: is not a folder; {cure}")


def check_images(folder: Path, what: str = "calibration images") -> None:
    """Refuse (DclsConvertError) a path that is not a folder of images.

    The message begins with `what`.
    """
    if not folder.is_dir():
        problem = "there is no such folder"
        if folder.exists():
            problem = "is not a folder"
        raise DclsConvertError(f"{what} {shortened(folder)}: {problem}")
    if not any(image_paths(folder)):
        raise DclsConvertError(
            f"{what} {shortened(folder)}: no files there end in {', '.join(IMAGE_SUFFIXES)}"
        )


def image_paths(folder: Path) -> Iterator[Path]:
    """Yield the files in and below the folder that have the suffix of an image.

    Names that begin with a dot, and folders of the system, are skipped: `.ipynb_checkpoints` and
    `@eaDir` hold copies, and `._a.png` is not an image.
    """
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        is_data = not any(part.startswith(".") or part.lower() in SYSTEM_FOLDERS for part in parts)
        if is_data and path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            yield path
