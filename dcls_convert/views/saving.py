"""Figures of matplotlib as files that are the same on every day and in every process."""

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
HASH_SALT = "dcls-convert"  # without one, the names inside an SVG are random


def save(figure: "Figure", file: Path | IO[bytes], suffix: str, **how: Any) -> None:
    """Write a figure in the format of the suffix, ".png", ".svg" or ".pdf"; `how` as matplotlib's savefig takes it."""
    import matplotlib

    suffix = suffix.lower()
    with matplotlib.rc_context({"svg.hashsalt": HASH_SALT}):
        figure.savefig(file, format=suffix[1:], metadata=UNDATED.get(suffix), **how)
