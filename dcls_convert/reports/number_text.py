"""Counts of parameters and MACs as text: all digits, three digits, or a column in one unit."""

from collections.abc import Callable, Iterable

from .costs import Change

NOT_COUNTED = "n/a"
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def with_separators(count: int | None, sign: str = "") -> str:
    """Return 4800 as "4,800", or as "+4,800" with the sign "+"."""
    if count is None:
        return NOT_COUNTED
    return f"{count:{sign},}"


def before_after(change: Change, write: Callable[[int], str] = with_separators) -> str:
    """Return 4800 and 3360 as "4,800 → 3,360"."""
    if change.before is None or change.after is None:
        return NOT_COUNTED
    return f"{write(change.before)} → {write(change.after)}"


def percent(change: Change, digits: int = 2) -> str:
    """Return the change from 4800 to 3360 as "-30.00 %"; empty if it is not known."""
    if change.percent is None:
        return ""
    return f"{change.percent:+.{digits}f} %"


def short_count(count: int | None) -> str:
    """Return 4455531264 as "4.46 G"."""
    if count is None:
        return NOT_COUNTED
    unit, name = _unit(count)
    return f"{_short(count / unit)}{name}"


def short_before_after(change: Change) -> str:
    """Return 4455531264 and 4970337024 as "4.46 → 4.97 G", in the unit of the first."""
    unit, name = _unit(change.before or 0)
    text = before_after(change, lambda count: _short(count / unit))
    if change.delta is None:
        return text
    return f"{text}{name}"


def in_one_unit(counts: Iterable[int | None]) -> tuple[Callable[[int], str], str]:
    """Return a function that formats the counts of a column, and the unit for its heading.

    Unit and digits suit the smallest count; zeros and unknown counts are ignored.
    """
    smallest = min(filter(None, counts), default=1)
    unit, name = _unit(smallest)
    if unit == 1 or smallest >= 100 * unit:
        digits = 0
    elif smallest < 10 * unit:
        digits = 2
    else:
        digits = 1
    heading = f",{name}" if name else ""
    return lambda count: f"{count / unit:,.{digits}f}", heading


def decimals_for(value: float) -> int:
    """Return the number of decimals that shows three digits: 4.46, 44.3, 15,900."""
    if value >= 99.95:
        return 0
    if value >= 9.995:
        return 1
    return 2


def _short(value: float) -> str:
    """Write three digits, or all before the point: 4.46, 44.3, 15,900.

    A whole number has no decimals.
    """
    digits = 0
    if value % 1:
        digits = decimals_for(value)
    return f"{value:,.{digits}f}"


def _unit(count: int) -> tuple[float, str]:
    """Return the largest unit that the count reaches, and its name."""
    for unit, name in UNITS:
        if count >= unit:
            return unit, name
    return UNITS[-1]
