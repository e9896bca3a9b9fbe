"""Find the largest kernel counts that a parameter budget has room for.

In the paper, the kernel count is the largest count that uses no more parameters than the replaced
weights (section 3). One more element per kernel costs a weight for each kernel line of each layer,
and coordinates for each kernel line of each tie group. `layers/elements.py` defines kernel lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import PlanError
from ..records import JsonFraction
from .layer_plan import LayerPlan, position_groups

UNSOLVED = 0  # marks a layer whose kernel count is still to be solved; nobody can state 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBudget:
    """How many parameters the new kernels and positions may use, and how many they do use."""

    kernel_count: int | None  # None if layers have different counts
    # The unrounded count that would use the whole budget; None if kernel_count is None.
    exact_count: JsonFraction | None
    limit: int  # parameters
    used: int  # parameters: weights of the elements, and positions


def budget_limit(layers: Sequence[LayerPlan], share: Fraction) -> int:
    """Return the parameters that new layers may use: a share of the weights that they replace."""
    return math.floor(share * sum(layer.dense_weights for layer in layers))


def check_counts(layers: Sequence[LayerPlan], share: Fraction) -> None:
    """Refuse impossible counts.

    Raises:
        PlanError: A stated count is more than the cells of its window, or the budget has no room
            for one element in each kernel without a stated count.
    """
    for layer in layers:
        if layer.kernel_count > layer.cells:
            raise PlanError(
                f"{layer.name}: kernel count {layer.kernel_count} is more than "
                f"the {layer.cells} cells of its window; use {layer.cells} or fewer"
            )
    is_solved = all(layer.kernel_count != UNSOLVED for layer in layers)
    if not is_solved and largest_count(layers, share) < 1:
        raise PlanError(_no_room_message(layers, share))


def largest_count(layers: Sequence[LayerPlan], share: Fraction) -> int:
    """Return the largest count for all UNSOLVED layers that the budget has room for.

    It is at most the number of cells of their smallest window.
    """
    return _whole(_exact_count(layers, share), layers)


def _whole(exact_count: Fraction, layers: Sequence[LayerPlan]) -> int:
    """Return the count, rounded down to what fits into the windows of the UNSOLVED layers."""
    cells = [layer.cells for layer in layers if layer.kernel_count == UNSOLVED]
    return min(math.floor(exact_count), *cells)


def _exact_count(layers: Sequence[LayerPlan], share: Fraction) -> Fraction:
    """Return the unrounded count of the UNSOLVED layers that would use the whole budget."""
    unsolved = [layer for layer in layers if layer.kernel_count == UNSOLVED]
    left = budget_limit(layers, share) - _params(layers)
    return Fraction(left, _params(_with_unsolved_counted(unsolved, 1)))


def solve_counts(
    layers: Sequence[LayerPlan], share: Fraction
) -> tuple[tuple[LayerPlan, ...], PlanBudget]:
    """Give the UNSOLVED layers one count: the largest that the budget has room for.

    Args:
        layers: Layers that `check_counts` accepts.
        share: Number of new parameters, as a share of the replaced weights.

    Returns:
        The layers with their counts, in the same order; and the budget.
    """
    limit = budget_limit(layers, share)
    if any(layer.kernel_count == UNSOLVED for layer in layers):
        exact = _exact_count(layers, share)
        layers = _with_unsolved_counted(layers, _whole(exact, layers))
    else:
        count = layers[0].kernel_count
        exact = limit / Fraction(_params(layers), count)  # by the parameters of one element
    has_one_count = len({layer.kernel_count for layer in layers}) == 1
    budget = PlanBudget(
        kernel_count=layers[0].kernel_count if has_one_count else None,
        exact_count=exact if has_one_count else None,
        limit=limit,
        used=_params(layers),
    )
    return tuple(layers), budget


def _no_room_message(layers: Sequence[LayerPlan], share: Fraction) -> str:
    """Return the error message for a budget that has no room for one element."""
    min_params = _params(_with_unsolved_counted(layers, 1))
    min_share = Fraction(min_params, budget_limit(layers, Fraction(1)))
    min_percent = math.ceil(min_share * 10_000) / 100  # rounded up
    min_text = f"{min_percent:.2f}".rstrip("0").rstrip(".")
    percent = float(share * 100)
    message = (
        f"a budget of {percent:.6g} % leaves no room for even one element per kernel; "
        f"the smallest sufficient budget is {min_text} %"
    )
    if percent < 1:  # the user probably means a share, such as 0.8
        message += f" (for a share of {percent:.6g}, give {100 * percent:.6g} %)"
    return message


def _with_unsolved_counted(layers: Sequence[LayerPlan], count: int) -> list[LayerPlan]:
    """Return the layers, with this count in place of UNSOLVED."""
    counted = []
    for layer in layers:
        if layer.kernel_count == UNSOLVED:
            layer = replace(layer, kernel_count=count)
        counted.append(layer)
    return counted


def _params(layers: Sequence[LayerPlan]) -> int:
    """Count the parameters; UNSOLVED layers have none, and a tie group's coordinates count once."""
    params = 0
    for group in position_groups(layers):
        first = group[0]
        params += first.lines * first.kernel_count * first.coordinates_per_element
        for layer in group:
            params += layer.lines * layer.kernel_count
    return params
