"""Files that are given or shipped: what can be told before their contents are loaded.

Imports no torch.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .errors import CheckpointError, DclsConvertError
from .text import shown

SHIPPED_RULES = Path(__file__).parent / "rules"  # in a wheel
CHECKOUT_RULES = Path(__file__).parents[1] / "rules"
# Suffixes of images that are read, and of pictures that are drawn.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
PLOT_LIBRARY = "matplotlib"  # in the extra `plot`

# A URL as a path, which has lost one of its slashes. Drives of Windows have one letter.
URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)", re.DOTALL)

MAX_TEXT_BYTES = 64 << 20  # bytes; the report of timm's largest model has half a megabyte


def read_bytes(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: Not a regular file (a pipe or a device might never end), or larger than `most`.
    """
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "is not a file")
    if state.st_size > most:
        raise OSError(errno.EFBIG, f"has {state.st_size:,} bytes; at most {most:,} are read")
    return path.read_bytes()


def builtin_rules() -> dict[str, Path]:
    """The rule sets that come with the package, by name."""
    folder = SHIPPED_RULES if SHIPPED_RULES.is_dir() else CHECKOUT_RULES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def is_checkpoint(path: Path) -> bool:
    """Whether the folder looks like a checkpoint."""
    has_config = os.path.isfile(path / "config.json")
    return has_config and os.path.isfile(path / "model.safetensors")


def check_file(path: Path, what: str = "checkpoint") -> None:
    """Check that there is a file.

    Raises:
        CheckpointError: There is none. The message begins with `what`, which may be "", and the
            path.
    """
    try:
        if not path.is_file():
            url = URL.fullmatch(path.as_posix())
            if url is not None:
                address = shown(f"{url[1]}://{url[2]}", 200)
                raise CheckpointError(
                    f"{what} {address}: download it first; URLs are not read".lstrip()
                )
            problem = "there is no such file"
            if path.exists():
                problem = "is not a file"
            elif path.is_symlink():
                problem = "leads nowhere"
            raise CheckpointError(f"{what} {path}: {problem}".lstrip())
    except OSError as error:
        raise CheckpointError(f"{what} {shown(path)}: {error.strerror}".lstrip()) from error


def check_folder(path: Path) -> Path:
    """The path; CheckpointError if it is not a folder."""
    if not path.is_dir():
        raise CheckpointError(f"{shown(path, 200)}: is not a folder")
    return path


def check_images(folder: Path, what: str = "calibration images") -> None:
    """Refuse what is not a folder of images; the message begins with `what`."""
    if not folder.is_dir():
        problem = "there is no such folder"
        if folder.exists():
            problem = "is not a folder"
        raise DclsConvertError(f"{what} {shown(folder)}: {problem}")
    if not any(image_paths(folder)):
        raise DclsConvertError(
            f"{what} {shown(folder)}: no files there end in {', '.join(IMAGE_SUFFIXES)}"
        )


def image_paths(folder: Path) -> Iterator[Path]:
    """Files in the folder and below it that have the suffix of an image."""
    for path in folder.rglob("*"):
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            yield path


def check_picture(path: Path, what: str) -> None:
    """Refuse a picture that could not be drawn: another suffix, or no matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise DclsConvertError(
            f"{what} {shown(path, 200)} must end in {', '.join(PICTURE_SUFFIXES)}"
        )
    if not can_plot():
        raise DclsConvertError(f"{what} needs {PLOT_LIBRARY}: pip install {PLOT_LIBRARY}")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec(PLOT_LIBRARY) is not None
