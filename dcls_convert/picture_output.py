"""Check, before drawing, a picture's file type and that the libraries are installed.

Imports no torch.
"""

from importlib.util import find_spec
from pathlib import Path

from .errors import DclsConvertError
from .text import shortened

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
# The libraries of the extra `plot`.
FIGURE_LIBRARY = "matplotlib"
PAGE_LIBRARY = "plotly"


def check_picture(path: Path, what: str) -> None:
    """Refuse (DclsConvertError) an unsupported suffix, or any picture without matplotlib."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise DclsConvertError(
            f"{what} {shortened(path, 200)} must end in {', '.join(PICTURE_SUFFIXES)}"
        )
    check_installed(what, FIGURE_LIBRARY)


def check_installed(what: str, *libraries: str) -> None:
    """Refuse (DclsConvertError) what cannot be drawn because a library is missing."""
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        raise DclsConvertError(f"{what} needs the extra plot: pip install {' '.join(missing)}")
