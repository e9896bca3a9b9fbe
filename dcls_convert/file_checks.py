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
# Common suffixes of weights files.
WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".tar")
# Suffixes of the image files that are read.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")

# Start of a URL that was turned into a Path, which collapses `//` to `/`. The scheme has at least
# two letters, so that Windows drives do not match.
URL = re.compile(r"[a-z][a-z0-9+]+:/")

MAX_TEXT_BYTES = 64 << 20  # bytes; the report of timm's largest model takes half a megabyte


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


def check_file(path: Path, what: str = "weights file") -> None:
    """Check that a file exists.

    Raises:
        CheckpointError: The path is not a file. The message begins with `what` (which may be "")
            and the path.
    """
    if path.is_file():
        return
    name = str(path)
    problem = "there is no such file"
    if URL.match(path.as_posix()):
        name = path.as_posix().replace(":/", "://", 1)
        problem = "download it first; URLs are not read"
    elif path.exists():
        problem = "is not a file"
    raise CheckpointError(f"{what} {shortened(name, 200)}: {problem}".lstrip())


def check_folder(path: Path) -> Path:
    """Return the path if it is a folder, else raise CheckpointError."""
    if path.is_dir():
        return path
    cure = "convert a model first, and name the folder that was written"
    if path.is_file():
        cure = (
            "to store trained weights, load them into the folder's model, and call save_converted"
        )
    raise CheckpointError(f"{shortened(path, 200)}: is not a folder; {cure}")


def check_images(folder: Path) -> None:
    """Refuse (DclsConvertError) a path that is not a folder of calibration images."""
    if not folder.is_dir():
        problem = "there is no such folder"
        if folder.exists():
            problem = "is not a folder"
        raise DclsConvertError(f"calibration images {shortened(folder)}: {problem}")
    if not any(image_paths(folder)):
        raise DclsConvertError(
            f"calibration images {shortened(folder)}: no files there end in "
            f"{', '.join(IMAGE_SUFFIXES)}"
        )


def image_paths(folder: Path) -> Iterator[Path]:
    """Yield the files in and below the folder that have the suffix of an image.

    Names that begin with a dot are skipped: `.ipynb_checkpoints` holds copies, and `._a.png` is not
    an image.
    """
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            yield path
