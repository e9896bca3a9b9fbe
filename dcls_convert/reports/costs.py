"""Costs of a conversion: counts before and after, for layers and for the whole model, and as text.

Counts are printed in full, with three digits, or in their column's unit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import computed_field

from ..planning.layer_plan import LayerPlan
from ..planning.plan import DraftPlan

NOT_COUNTED = "n/a"
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A count before and after a conversion; None if unknown. The field's name says the unit."""

    before: int | None = None
    after: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def delta(self) -> int | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        if self.delta is None or not self.before:
            return None
        return 100 * self.delta / self.before


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsChange(Change):
    """Parameters of the whole model. `after` includes `weights` and `positions`."""

    weights: int  # weights of all elements; in a folded model, cells of all windows
    positions: int  # positions and sigmas; tied ones are counted once


@dataclass(frozen=True, kw_only=True, slots=True)
class MacsChange(Change):
    """MACs of the whole model for one input."""

    note: str | None = None  # why MACs are unknown, or what they omit

    @property
    def note_sentence(self) -> str:
        """The note as a sentence; empty if there is no note."""
        if self.note is None:
            return ""
        problem = "were not counted" if self.before is None else "are too low"
        return f"MACs {problem}: {self.note}."


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReport:
    """The scope of the kernel counts, and the parameters that they may use and do use."""

    scope: str
    kernel_count: int | None  # None if layers have different counts
    limit: int  # parameters that the new kernels may use
    used: int  # parameters that they use
    # The fractional count that would use the whole budget, rounded down to two decimals; None if
    # layers have different counts.
    exact_count: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def slack(self) -> int:
        """Parameters left; negative if a given count exceeds the budget."""
        return self.limit - self.used


def params_of(layers: Iterable[LayerPlan]) -> Change:
    """Sum parameters, with biases and positions; shared positions count once, at their owner."""
    before = 0
    after = 0
    for layer in layers:
        before += layer.params_before
        after += layer.params_after
    return Change(before=before, after=after)


def macs_of(layers: Iterable[LayerPlan]) -> Change:
    """Sum MACs for one image; unknown if a layer's MACs are unknown."""
    before = 0
    after = 0
    for layer in layers:
        layer_before = layer.macs_before
        layer_after = layer.macs_after
        if layer_before is None or layer_after is None:
            return Change()
        before += layer_before
        after += layer_after
    return Change(before=before, after=after)


def macs_of_model(plan: DraftPlan) -> MacsChange:
    """Return the MACs of the whole model for one input."""
    if plan.macs is None:
        return MacsChange(note=plan.macs_note)
    added = macs_of(plan.layers).delta or 0
    return MacsChange(before=plan.macs, after=plan.macs + added, note=plan.macs_note)


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


def short_before_after(change: Change) -> str:
    """Return 4455531264 and 4970337024 as "4.46 → 4.97 G", in the unit of the count before.

    The text is "4.46 G" if only the count before is known.
    """
    if change.before is None:
        return NOT_COUNTED
    unit, name = _unit_of(change.before)
    text = _short_number(change.before / unit)
    if change.after is not None:
        text += f" → {_short_number(change.after / unit)}"
    return f"{text}{name}"


def in_one_unit(counts: Iterable[int | None]) -> tuple[Callable[[int], str], str]:
    """Return a function that formats the counts of a column, and the unit for its heading.

    The unit and the decimals suit the smallest count; zeros and unknown counts are ignored.
    """
    smallest = min(filter(None, counts), default=1)
    unit, name = _unit_of(smallest)
    digits = 0 if unit == 1 else _decimals(smallest / unit)
    heading = f",{name}" if name else ""
    return lambda count: f"{count / unit:,.{digits}f}", heading


def _short_number(value: float) -> str:
    """Return a value with three digits, or with all digits before the point: 4.46, 44.3, 15,900.

    A whole number has no decimals.
    """
    digits = 0 if value % 1 == 0 else _decimals(value)
    return f"{value:,.{digits}f}"


def _decimals(value: float) -> int:
    """Return the number of decimals with which a value, once rounded, has three digits."""
    if value >= 99.95:
        return 0
    return 1 if value >= 9.995 else 2


def _unit_of(count: int) -> tuple[float, str]:
    """Return the largest unit that the count reaches, and its name."""
    for unit, name in UNITS:
        if count >= unit:
            return unit, name
    return UNITS[-1]
