"""How many elements a parameter budget has room for: the largest count that uses no more parameters
than the replaced weights (paper, section 3).

One more element costs a weight for each kernel line of each layer, and coordinates for each line of
each tie group. Kernel lines are those of `layers/elements.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import PlanError
from ..options import Scope
from ..records import JsonFraction
from ..text import listed
from .layer_plan import LayerPlan

UNSOLVED = 0  # kernel count of a layer for which the budget decides; nothing can state a count of 0
MODEL_UNIT = "model"  # the unit of the budget with scope "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUnit:
    """The count of one unit (the model, a stage or a layer), and how much of the budget it uses."""

    name: str
    kernel_count: int | None  # None: its layers have different counts, stated by rules
    # The count, not rounded, that would use the whole budget; None where kernel_count is None.
    exact_count: JsonFraction | None
    limit: int  # parameters
    used: int  # parameters: weights of the elements, and positions


def solve_counts(
    drafts: Sequence[LayerPlan], scope: Scope, share: Fraction
) -> tuple[tuple[LayerPlan, ...], tuple[BudgetUnit, ...]]:
    """Give the UNSOLVED layers of each unit one count: the largest that its budget has room for.

    It is at most the number of cells of their smallest window.

    Args:
        drafts: Layers with a stated count, or UNSOLVED.
        scope: What is one unit: the model, a stage or a layer.
        share: What a unit's new parameters may use, as a share of the weights that it replaces.

    Returns:
        The layers with their counts, in the order of `drafts`; and what each unit may use and uses.

    Raises:
        PlanError: A stated count is more than the cells of the window, or the budget has no room
            for one element.
    """
    members_of: dict[str, list[LayerPlan]] = {}
    for draft in drafts:
        if draft.kernel_count > draft.cells:
            raise PlanError(
                f"{draft.name}: kernel count {draft.kernel_count} is more than "
                f"the {draft.cells} cells of its window; use {draft.cells} or fewer"
            )
        members_of.setdefault(_unit_name(draft, scope), []).append(draft)
    layer_of: dict[str, LayerPlan] = {}
    units: list[BudgetUnit] = []
    min_shares: dict[str, Fraction] = {}  # of units whose budget has no room for one element
    for name, members in members_of.items():
        layers, unit = _solve_unit(name, members, share)
        for layer in layers:
            layer_of[layer.name] = layer
        if unit.kernel_count is not None and unit.kernel_count < 1:
            min_shares[name] = _min_share(members)
        units.append(unit)
    if min_shares:
        raise PlanError(_no_room_message(min_shares, share))
    return tuple(layer_of[draft.name] for draft in drafts), tuple(units)


def _no_room_message(min_shares: Mapping[str, Fraction], share: Fraction) -> str:
    """What to say of units whose budget has no room for one element, by their sufficient shares."""
    min_percent = math.ceil(max(min_shares.values()) * 10_000) / 100  # rounded up
    min_text = f"{min_percent:.2f}".rstrip("0").rstrip(".")
    percent = float(share * 100)
    message = (
        f"a budget of {percent:.6g} % leaves no room for even one element per kernel in "
        f"{listed(min_shares, 1)}; the smallest sufficient budget is {min_text} %"
    )
    if percent < 1:  # probably meant as a share
        message += f" (for a share of {percent:.6g}, give {100 * percent:.6g} %)"
    return message


def _unit_name(draft: LayerPlan, scope: Scope) -> str:
    """The unit whose budget pays for the layer. A tie group has one count, so it is one unit."""
    if scope == "stage":
        return draft.stage or draft.name
    if scope == "layer":
        return draft.tie_group or draft.name
    return MODEL_UNIT


def _solve_unit(
    name: str, members: Sequence[LayerPlan], share: Fraction
) -> tuple[list[LayerPlan], BudgetUnit]:
    """The layers of a unit with their counts, and the unit. The count is below 1 without room."""
    limit = math.floor(share * _replaced_weights(members))
    unsolved = [layer for layer in members if layer.kernel_count == UNSOLVED]
    exact: Fraction | None = None
    count: int | None = None
    if unsolved:
        params_per_element = Fraction(_params(_with_count(unsolved, 1)))
        exact = (limit - _params(members)) / params_per_element
        min_cells = min(layer.cells for layer in unsolved)
        count = min(math.floor(exact), min_cells)
        layers = _with_count(members, count)
    else:
        layers = list(members)
        if len({layer.kernel_count for layer in members}) == 1:
            count = members[0].kernel_count
            params_per_element = Fraction(_params(members), count)
            exact = limit / params_per_element
    unit = BudgetUnit(
        name=name, kernel_count=count, exact_count=exact, limit=limit, used=_params(layers)
    )
    return layers, unit


def _min_share(members: Sequence[LayerPlan]) -> Fraction:
    """The share with which the budget would have room for one element in each UNSOLVED layer."""
    return Fraction(_params(_with_count(members, 1)), _replaced_weights(members))


def _replaced_weights(layers: Sequence[LayerPlan]) -> int:
    weights = 0
    for layer in layers:
        weights += layer.dense_weights
    return weights


def _with_count(layers: Sequence[LayerPlan], count: int) -> list[LayerPlan]:
    """The layers, UNSOLVED ones with this count."""
    counted = []
    for layer in layers:
        if layer.kernel_count == UNSOLVED:
            layer = replace(layer, kernel_count=count)
        counted.append(layer)
    return counted


def _params(layers: Sequence[LayerPlan]) -> int:
    """Parameters of layers; UNSOLVED ones have none, and coordinates of a tie group count once."""
    weights = 0
    coordinates_of: dict[str, int] = {}  # by tie group; a layer alone is a group of its own
    for layer in layers:
        elements = layer.lines * layer.kernel_count
        weights += elements
        group = layer.tie_group or f"\0{layer.name}"  # no tie group is named with a null character
        coordinates_of[group] = elements * layer.coordinates_per_element
    return weights + sum(coordinates_of.values())
