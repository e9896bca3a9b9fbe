"""Check, before drawing, a picture's file type and that matplotlib is installed.

Imports no torch.
"""

from importlib.util import find_spec
from pathlib import Path

from .errors import DclsConvertError
from .text import shortened

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
PLOT_LIBRARY = "matplotlib"  # in the extra `plot`


def check_picture(path: Path, what: str) -> None:
    """Refuse (DclsConvertError) an unsupported suffix, or any picture without matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise DclsConvertError(
            f"{what} {shortened(path, 200)} must end in {', '.join(PICTURE_SUFFIXES)}"
        )
    if not can_plot():
        raise DclsConvertError(f"{what} needs {PLOT_LIBRARY}: pip install {PLOT_LIBRARY}")


def can_plot() -> bool:
    """True if matplotlib is installed."""
    return find_spec(PLOT_LIBRARY) is not None
