"""How many elements a parameter budget admits, and what convolutions cost. Integers and fractions only.

A kernel line is one (output channel, input channel per group, cell of a dense axis). One more element in every kernel
costs one weight for each line of each layer, and the element's coordinates for each line of each tie group. The paper's
rule (section 3 "Kernel count tuning") is the largest count that stays within the parameters replaced.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from ..errors import PlanError, listed, shown

LEAST_PERCENT = Decimal("0.0001")  # both bounds keep fractions short: as one, 1e-999999 would fill the memory
MOST_PERCENT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetLayer:
    """What the count rule needs to know about one layer."""

    name: str
    unit: str  # layers with the same unit get one count: the model, a stage or the layer
    tie_group: str | None  # None: positions of its own
    lines: int  # out * in / groups * cells of dense axes
    dense_weights: int  # weights of the kernel that is replaced
    coordinates: int  # learnable coordinates of an element: axes, twice that where sigma is learnt
    cells: int  # cells of the window along the learnt axes: the most elements that a kernel can use
    given_count: int | None = None  # stated by the user or a rule; not solved for


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUnit:
    """The count of one unit (the model, a stage or a layer), and how much of the budget it uses."""

    name: str
    kernel_count: int | None  # None: its layers have counts that rules state
    exact_count: Fraction | None  # the bound before rounding down; None where nothing was solved
    limit: int  # parameters
    used: int  # parameters: weights of the elements, and positions


def parse_percent(text: str | float | int) -> Fraction:
    """A percentage as an exact fraction of 1: "99.5" -> 199/200.

    Raises:
        PlanError: Not a number, or out of bounds.
    """
    try:
        percent = Decimal(str(text))
    except InvalidOperation:
        percent = Decimal("nan")
    if not percent.is_finite() or not LEAST_PERCENT <= percent <= MOST_PERCENT:
        raise PlanError(f"budget {shown(text)!r} must be a percentage from {LEAST_PERCENT} to {MOST_PERCENT}")
    return Fraction(percent) / 100


def solve_counts(layers: Sequence[BudgetLayer], share: Fraction) -> tuple[dict[str, int], tuple[BudgetUnit, ...]]:
    """For every unit, the largest count that keeps within `share` of the weights it replaces.

    Returns:
        The kernel count of every layer by its name, and the books of the units.

    Raises:
        PlanError: The budget of a unit admits no element; names the smallest one that would.
    """
    units: dict[str, list[BudgetLayer]] = {}
    for layer in layers:
        if layer.given_count is not None and layer.given_count > layer.cells:
            raise PlanError(
                f"{layer.name}: kernel count {layer.given_count} is more than the {layer.cells} cells of its window; "
                f"use {layer.cells} or fewer"
            )
        units.setdefault(layer.unit, []).append(layer)
    counts: dict[str, int] = {}
    solved: list[BudgetUnit] = []
    needed: dict[str, Fraction] = {}  # unit without an element -> the share with which it would have one
    for name, members in units.items():
        replaced = sum(layer.dense_weights for layer in members)
        limit = math.floor(share * replaced)
        free = [layer for layer in members if layer.given_count is None]
        spent = _params((layer, layer.given_count) for layer in members if layer.given_count is not None)
        element = _params((layer, 1) for layer in free or members)
        exact, count = None, None
        if free:
            exact = Fraction(limit - spent, element)
            count = min(math.floor(exact), min(layer.cells for layer in free))
            if count < 1:
                needed[name] = Fraction(spent + element, replaced)
        elif len({layer.given_count for layer in members}) == 1:
            exact, count = Fraction(limit, element), members[0].given_count
        counts |= {layer.name: layer.given_count or count or 0 for layer in members}
        used = _params((layer, counts[layer.name]) for layer in members)
        solved.append(BudgetUnit(name=name, kernel_count=count, exact_count=exact, limit=limit, used=used))
    if needed:
        least = math.ceil(max(needed.values()) * 10_000) / 100  # percent, rounded up
        raise PlanError(
            f"a budget of {float(share * 100):.6g} % admits no element in {listed(needed, 1)}; "
            f"the smallest budget that does is {f'{least:.2f}'.rstrip('0').rstrip('.')} %"
        )
    return counts, tuple(solved)


def _params(counted: Iterable[tuple[BudgetLayer, int]]) -> int:
    """Parameters of layers with these kernel counts; the coordinates of a tie group count once."""
    counted = list(counted)
    tied = {layer.tie_group or f"\0{layer.name}": layer.lines * layer.coordinates * n for layer, n in counted}
    return sum(layer.lines * n for layer, n in counted) + sum(tied.values())
