"""How many elements a parameter budget admits: the largest count within the parameters replaced
(paper, section 3).

One more element costs a weight for each kernel line of each layer, and coordinates for each line of
each tie group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING

from ..errors import PlanError, listed, shown
from ..options import Scope

if TYPE_CHECKING:
    from .plan import LayerPlan  # which imports torch

LEAST_PERCENT = Decimal(
    "0.0001"
)  # both bounds keep fractions short: as one, 1e-999999 would fill the memory
MOST_PERCENT = 100_000
UNSOLVED = 0  # the kernel count that is still to be solved for; not one that can be stated
MODEL_UNIT = "model"  # the unit of the budget with scope "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUnit:
    """The count of one unit (the model, a stage or a layer), and how much of the budget it uses."""

    name: str
    kernel_count: int | None  # None: its layers have counts that rules state
    exact_count: Fraction | None  # the bound before rounding down; None where nothing was solved
    limit: int  # parameters
    used: int  # parameters: weights of the elements, and positions


def parse_percent(text: str | float | int) -> Fraction:
    """A percentage as an exact fraction of 1: 99.5 and "99.5%" -> 199/200. PlanError for others,
    and out of bounds.
    """
    try:
        percent = Decimal(str(text).removesuffix("%"))
    except InvalidOperation:
        percent = Decimal("nan")
    if not percent.is_finite() or not LEAST_PERCENT <= percent <= MOST_PERCENT:
        raise PlanError(
            f"budget {shown(text)!r} must be a percentage from {LEAST_PERCENT} to {MOST_PERCENT}"
        )
    return Fraction(percent) / 100


def solve_counts(
    drafts: Sequence["LayerPlan"], scope: Scope, share: Fraction
) -> tuple[tuple["LayerPlan", ...], tuple[BudgetUnit, ...]]:
    """The drafts, UNSOLVED ones with the largest count within `share` of what their unit replaces;
    and the books.
    """
    units: dict[str, list[LayerPlan]] = {}
    for draft in drafts:
        if draft.kernel_count > draft.cells:
            raise PlanError(
                f"{draft.name}: kernel count {draft.kernel_count} is more than the {draft.cells} "
                "cells of its window; "
                f"use {draft.cells} or fewer"
            )
        # A tie group has one count. With scope "layer", the group counts as one layer.
        unit = {"stage": draft.stage or draft.name, "layer": draft.tie_group or draft.name}.get(
            scope, MODEL_UNIT
        )
        units.setdefault(unit, []).append(draft)
    counts = {draft.name: draft.kernel_count for draft in drafts}
    solved: list[BudgetUnit] = []
    needed: dict[
        str, Fraction
    ] = {}  # unit without an element -> the share with which it would have one
    for name, members in units.items():
        replaced = sum(layer.dense_weights for layer in members)
        limit = math.floor(share * replaced)
        free = [layer for layer in members if layer.kernel_count == UNSOLVED]
        element = _params(free or members, dict.fromkeys(counts, 1))
        exact, count = None, None
        if free:
            spent = _params(members, counts)
            exact = Fraction(limit - spent, element)
            count = min(math.floor(exact), min(layer.cells for layer in free))
            if count < 1:
                needed[name] = Fraction(spent + element, replaced)
            counts |= dict.fromkeys([layer.name for layer in free], count)
        elif len({layer.kernel_count for layer in members}) == 1:
            exact, count = Fraction(limit, element), members[0].kernel_count
        used = _params(members, counts)
        solved.append(
            BudgetUnit(name=name, kernel_count=count, exact_count=exact, limit=limit, used=used)
        )
    if needed:
        least = math.ceil(max(needed.values()) * 10_000) / 100  # percent, rounded up
        raise PlanError(
            f"a budget of {float(share * 100):.6g} % admits no element in {listed(needed, 1)}; "
            f"the smallest budget that does is {f'{least:.2f}'.rstrip('0').rstrip('.')} %"
        )
    return tuple(replace(draft, kernel_count=counts[draft.name]) for draft in drafts), tuple(solved)


def _params(layers: Sequence["LayerPlan"], counts: Mapping[str, int]) -> int:
    """Parameters of layers with these kernel counts; the coordinates of a tie group count once."""
    elements = {layer.name: layer.lines * counts[layer.name] for layer in layers}
    tied = {
        layer.tie_group or f"\0{layer.name}": elements[layer.name] * layer.coordinates
        for layer in layers
    }
    return sum(elements.values()) + sum(tied.values())
