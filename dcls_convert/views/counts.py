"""How counts of parameters and MACs are written: exactly, in three digits, or a column in one unit."""

from collections.abc import Callable, Iterable

from ..reports.report import Change

NOT_COUNTED = "n/a"
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def exact(count: int | None, sign: str = "") -> str:
    return NOT_COUNTED if count is None else f"{count:{sign},}"


def arrow(change: Change, write: Callable[[int], str] = exact) -> str:
    """4800 and 3360 -> "4,800 → 3,360"."""
    if change.before is None or change.after is None:
        return NOT_COUNTED
    return f"{write(change.before)} → {write(change.after)}"


def percent(change: Change, digits: int = 2) -> str:
    return "" if change.percent is None else f"{change.percent:+.{digits}f} %"


def short_count(count: int | None) -> str:
    """4455531264 -> "4.46 G"."""
    if count is None:
        return NOT_COUNTED
    unit, name = _unit(count)
    return f"{_short(count / unit)}{name}"


def short_arrow(change: Change) -> str:
    """4455531264 and 4970337024 -> "4.46 → 4.97 G"."""
    unit, name = _unit(change.before or 0)
    return arrow(change, lambda count: _short(count / unit)) + name * (change.delta is not None)


def in_one_unit(counts: Iterable[int | None]) -> tuple[Callable[[int], str], str]:
    """How a column writes each of its counts, and its unit for the heading: that of the smallest count."""
    least = min(filter(None, counts), default=1)
    unit, name = _unit(least)
    digits = 0 if unit == 1 else 2 if least < 10 * unit else 1 if least < 100 * unit else 0
    return lambda count: f"{count / unit:,.{digits}f}", f",{name}" if name else ""


def _short(value: float) -> str:
    """Three digits, or all before the point: 4.46, 44.3, 15,900."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}" if value % 1 else f"{value:,.0f}"


def _unit(count: int) -> tuple[float, str]:
    return next((unit for unit in UNITS if count >= unit[0]), UNITS[-1])
