"""Names and defaults of the options, shared by command line, rule files and library.

Imports neither torch nor typer: `--help` reads this file.
"""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Final, Literal, get_args

from .errors import PlanError
from .text import shortened

# The interpolations are defined in layers/interpolation.py.
InterpolationName = Literal["bilinear", "triangle", "gaussian"]
Scope = Literal["auto", "model", "error"]
Tie = Literal["stage", "none"]
Init = Literal["auto", "random", "largest", "fit", "exact"]
Positions = Literal["normal", "kernel", "uniform"]
AuthorsVersion = Literal["v0", "v1"]  # layers without sigma; conversion/authors.py
Kind = Literal["depthwise", "grouped", "dense"]  # kinds of convolutions, by their groups

INTERPOLATION_NAMES: tuple[str, ...] = get_args(InterpolationName)
SCOPES: tuple[Scope, ...] = get_args(Scope)
TIES: tuple[str, ...] = get_args(Tie)
INITS: tuple[str, ...] = get_args(Init)
POSITIONS: tuple[str, ...] = get_args(Positions)

AUTO: Final = "auto"
DEFAULT_INTERPOLATION: InterpolationName = "bilinear"  # as in the paper
# Scope for trained kernels: the budget is divided among tie groups to minimise the sum of errors.
ERROR_SCOPE: Scope = "error"
# Value of both `kernel_count` and `init`: one element in every cell of the old kernel, so that the
# new layer computes the same function.
EXACT: Final = "exact"
MAX_SIDE = 9_999  # cells or pixels, four digits; a larger kernel or image is a typing mistake
MAX_PIXELS = 2048 * 2048  # pixels or voxels of an image on which outputs are compared
MAX_COUNT = 10**9  # elements, classes or channels
# A growth, such as "+4": each side of the window is so many cells longer than the kernel's extent.
# A growth is even, because window and extent must both be odd or both be even.
GROWTH = r"\+[1-9][0-9]{0,3}"
EVEN_GROWTH = r"\+([2468]|[1-9][0-9]{0,2}[02468])"
MIN_GROWTH = 2  # cells
MAX_WINDOW = 17  # cells; the largest window of "auto", which is the paper's for ConvNeXt
# Percent of MACs that recommended windows may add. With windows of 17x17, the paper's ConvNeXts add
# 7.3 to 11.6 (tests/test_numbers.py).
MAX_ADDED_COST_PERCENT = 15.0
CALIBRATION_IMAGES = 80  # images taken from a folder by default
PICTURE_WIDTH = 6.75  # inches; width of the text in a two-column conference paper
POSITION_LR_SCALE = 5.0  # paper, section 3 "Positions learning rate scaling"
DEFAULT_BUDGET = 100.0  # percent of the replaced weights; the paper keeps the parameter count
# Bounds of a budget. They keep its exact fraction short: 1e-999999 as a fraction would fill the
# memory.
MIN_PERCENT = Decimal("0.0001")
MAX_PERCENT = 100_000


def check_choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Refuse (PlanError) a value that is not among an option's allowed values."""
    if value not in allowed:
        names = ", ".join(filter(None, allowed))
        raise PlanError(f"{name}={shortened(repr(value))} must be one of {names}")


def even_growth(growth: str) -> str:
    """Return a growth (text that matches GROWTH) if it is even.

    Raises:
        ValueError: The growth is odd. The message suggests even growths.
    """
    cells = int(growth)
    if cells % 2 == 0:
        return growth
    allowed = f"+{cells + 1}"
    if cells > MIN_GROWTH:
        allowed = f"+{cells - 1} or {allowed}"
    raise ValueError(f"growth {growth} must be even, or the output would shift; use {allowed}")


def parse_percent(text: str | float | int) -> Fraction:
    """Return a percentage as an exact fraction of 1: 99.5 and "99.5%" -> 199/200.

    Raises:
        PlanError: The percentage is not a number, or out of bounds.
    """
    try:
        percent = Decimal(str(text).removesuffix("%"))
    except InvalidOperation:
        percent = Decimal("nan")
    if not percent.is_finite() or not MIN_PERCENT <= percent <= MAX_PERCENT:
        raise PlanError(
            f"budget {shortened(text)!r} must be a percentage from {MIN_PERCENT} to {MAX_PERCENT}"
        )
    return Fraction(percent) / 100
