"""Find how many elements a parameter budget has room for.

In the paper, the count is the largest that uses no more parameters than the replaced weights
(section 3). One more element per kernel costs a weight for each kernel line of each layer, and
coordinates for each kernel line of each tie group. `layers/elements.py` defines kernel lines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import PlanError
from ..options import Scope
from ..records import JsonFraction
from ..text import short_list
from .layer_plan import LayerPlan

UNSOLVED = 0  # kernel count of a layer until the budget decides it; no rule or option can state 0
MODEL_UNIT = "model"  # the unit of the budget with scope "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetUnit:
    """The count of one unit (the model, a stage or a layer), and how much of the budget it uses."""

    name: str
    kernel_count: int | None  # None if its layers have different counts
    # The unrounded count that would use the whole budget; None if kernel_count is None.
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
        scope: What a unit is: the model, a stage or a layer.
        share: Number of new parameters that a unit may have, as a share of its replaced weights.

    Returns:
        The layers with their counts, in the order of `drafts`; and the budget of each unit.

    Raises:
        PlanError: A stated count is more than the cells of its window, or a unit's budget has no
            room for one element.
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
    min_shares: dict[str, Fraction] = {}  # sufficient shares, by unit without room for an element
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
    """Return the error message for units whose budget has no room for one element.

    Args:
        min_shares: The smallest sufficient share of each such unit.
        share: The share that was given.
    """
    min_percent = math.ceil(max(min_shares.values()) * 10_000) / 100  # rounded up
    min_text = f"{min_percent:.2f}".rstrip("0").rstrip(".")
    percent = float(share * 100)
    message = (
        f"a budget of {percent:.6g} % leaves no room for even one element per kernel in "
        f"{short_list(min_shares, 1)}; the smallest sufficient budget is {min_text} %"
    )
    if percent < 1:  # probably meant as a share
        message += f" (for a share of {percent:.6g}, give {100 * percent:.6g} %)"
    return message


def _unit_name(draft: LayerPlan, scope: Scope) -> str:
    """Return the unit whose budget pays for the layer.

    With scope "layer", a tie group is one unit, because its layers have one count.
    """
    if scope == "stage":
        return draft.stage or draft.name
    if scope == "layer":
        return draft.tie_group or draft.name
    return MODEL_UNIT


def _solve_unit(
    name: str, members: Sequence[LayerPlan], share: Fraction
) -> tuple[list[LayerPlan], BudgetUnit]:
    """Return the layers of a unit with their counts, and the unit.

    The count is below 1 if the budget has no room for one element.
    """
    limit = math.floor(share * _replaced_weights(members))
    unsolved = [layer for layer in members if layer.kernel_count == UNSOLVED]
    exact: Fraction | None = None
    count: int | None = None
    if unsolved:
        params_per_element = Fraction(_params(_with_unsolved_counted(unsolved, 1)))
        exact = (limit - _params(members)) / params_per_element
        min_cells = min(layer.cells for layer in unsolved)
        count = min(math.floor(exact), min_cells)
        layers = _with_unsolved_counted(members, count)
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
    """Return the smallest share that has room for one element in each UNSOLVED layer."""
    return Fraction(_params(_with_unsolved_counted(members, 1)), _replaced_weights(members))


def _replaced_weights(layers: Sequence[LayerPlan]) -> int:
    weights = 0
    for layer in layers:
        weights += layer.dense_weights
    return weights


def _with_unsolved_counted(layers: Sequence[LayerPlan], count: int) -> list[LayerPlan]:
    """Return the layers; those that are UNSOLVED get this count."""
    counted = []
    for layer in layers:
        if layer.kernel_count == UNSOLVED:
            layer = replace(layer, kernel_count=count)
        counted.append(layer)
    return counted


def _params(layers: Sequence[LayerPlan]) -> int:
    """Count the parameters; UNSOLVED layers have none, and a tie group's coordinates count once."""
    weights = 0
    coordinates_of: dict[str, int] = {}  # by tie group; an untied layer is a group of its own
    for layer in layers:
        elements = layer.lines * layer.kernel_count
        weights += elements
        group = layer.tie_group or f"\0{layer.name}"  # no tie group's name has a null character
        coordinates_of[group] = elements * layer.coordinates_per_element
    return weights + sum(coordinates_of.values())
