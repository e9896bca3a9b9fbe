"""Sizes of text and axes in a figure, in inches."""

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

FONT_SIZE = 7  # points
SMALL_FONT_SIZE = 6  # points; numbers at axes, and titles of panels
LINE = 0.14  # height of a line of text
CHARACTERS_PER_INCH = 19  # of text, at most
MARGIN = 0.05  # of the figure


def add_axes(part: "SubFigure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Add axes to a part of a figure; position and size are in inches."""
    whole_width, whole_height = _size(part)
    return part.add_axes(
        (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height)
    )


def add_text(part: "SubFigure", text: str) -> None:
    """Add lines of text at the top left of a part of a figure."""
    width, height = _size(part)
    part.text(MARGIN / width, 1 - MARGIN / height, text, va="top")


def _size(part: "SubFigure") -> tuple[float, float]:
    """Return the width and height of a part of a figure, in inches."""
    return part.bbox.width / part.dpi, part.bbox.height / part.dpi


def wrapped(text: str, width: float) -> str:
    """Return a text in lines that fit a figure of this width."""
    return textwrap.fill(text, int((width - 2 * MARGIN) * CHARACTERS_PER_INCH))
