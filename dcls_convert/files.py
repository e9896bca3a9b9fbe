"""Files that are given: what can be refused by their paths alone, before anything is loaded. Imports no torch."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .errors import CheckpointError, DclsConvertError, shown

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")  # of images
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
PLOT_LIBRARY = "matplotlib"  # of the extra `plot`


def check_weights_file(path: Path, what: str = "checkpoint") -> None:
    """Refuse what cannot be a file; CheckpointError says why, and begins with `what`."""
    try:
        if not path.is_file():
            missing = "there is no such file" if not path.exists() else "is not a file"
            raise CheckpointError(f"{what} {path}: {missing}")
    except OSError as error:
        raise CheckpointError(f"{what} {shown(path)}: {error.strerror}") from error


def check_images(folder: Path, what: str = "calibration images") -> None:
    """Refuse what is no folder of images, before any work; the message begins with `what`."""
    if not folder.is_dir():
        missing = "is not a folder" if folder.exists() else "there is no such folder"
        raise DclsConvertError(f"{what} {shown(folder)}: {missing}")
    if not any(image_paths(folder)):
        raise DclsConvertError(f"{what} {shown(folder)}: no files there end in {', '.join(SUFFIXES)}")


def image_paths(folder: Path) -> Iterator[Path]:
    """Files there, however deep, that are named as images."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def check_picture(path: Path, what: str) -> None:
    """Refuse a picture that could not be drawn: of another suffix, or without matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise DclsConvertError(f"{what} {shown(path, 200)} must end in {', '.join(PICTURE_SUFFIXES)}")
    if not can_plot():
        raise DclsConvertError(f"{what} needs {PLOT_LIBRARY}: pip install 'dcls-convert[plot]'")


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec(PLOT_LIBRARY) is not None
