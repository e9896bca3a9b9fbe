"""Kernel counts: the largest that a parameter budget has room for, or those of given elements.

In the paper, a count is the largest that uses no more parameters than the replaced weights
(section 3). One more element per kernel costs a weight for each kernel line of each layer, and
coordinates for each kernel line of each tie group. `layers/elements.py` defines kernel lines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..errors import PlanError
from ..networks.sites import Skipped
from ..records import JsonFraction
from ..text import shortened
from .layer_plan import LayerPlan, position_groups

UNSOLVED = 0  # kernel count of a layer until the budget decides it; no rule or option can state 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBudget:
    """How many parameters the new kernels and positions may use, and how many they do use."""

    kernel_count: int | None  # None if layers have different counts
    # The unrounded count that would use the whole budget; None if kernel_count is None.
    exact_count: JsonFraction | None
    limit: int  # parameters
    used: int  # parameters: weights of the elements, and positions


def solve_counts(
    drafts: Sequence[LayerPlan], share: Fraction
) -> tuple[tuple[LayerPlan, ...], PlanBudget]:
    """Give the UNSOLVED layers one count: the largest that the budget has room for.

    It is at most the number of cells of their smallest window.

    Args:
        drafts: Layers with a stated count, or UNSOLVED.
        share: Number of new parameters, as a share of the replaced weights.

    Returns:
        The layers with their counts, in the order of `drafts`; and the budget.

    Raises:
        PlanError: A stated count is more than the cells of its window, or the budget has no room
            for one element.
    """
    for draft in drafts:
        if draft.kernel_count > draft.cells:
            raise PlanError(
                f"{draft.name}: kernel count {draft.kernel_count} is more than "
                f"the {draft.cells} cells of its window; use {draft.cells} or fewer"
            )
    replaced_weights = sum(layer.dense_weights for layer in drafts)
    limit = math.floor(share * replaced_weights)
    unsolved = [layer for layer in drafts if layer.kernel_count == UNSOLVED]
    layers = list(drafts)
    if unsolved:
        params_per_element = Fraction(_params(_with_unsolved_counted(unsolved, 1)))
        exact = (limit - _params(drafts)) / params_per_element
        min_cells = min(layer.cells for layer in unsolved)
        count = min(math.floor(exact), min_cells)
        if count < 1:
            raise PlanError(_no_room_message(drafts, share, replaced_weights))
        layers = _with_unsolved_counted(drafts, count)
    else:
        count = drafts[0].kernel_count
        params_per_element = Fraction(_params(drafts), count)  # of one element in every kernel
        exact = limit / params_per_element
    has_one_count = len({layer.kernel_count for layer in layers}) == 1
    budget = PlanBudget(
        kernel_count=count if has_one_count else None,
        exact_count=exact if has_one_count else None,
        limit=limit,
        used=_params(layers),
    )
    return tuple(layers), budget


def _no_room_message(drafts: Sequence[LayerPlan], share: Fraction, replaced_weights: int) -> str:
    """Return the error message for a budget that has no room for one element."""
    min_params = _params(_with_unsolved_counted(drafts, 1))
    min_share = Fraction(min_params, replaced_weights)
    min_percent = math.ceil(min_share * 10_000) / 100  # rounded up
    min_text = f"{min_percent:.2f}".rstrip("0").rstrip(".")
    percent = float(share * 100)
    message = (
        f"a budget of {percent:.6g} % leaves no room for even one element per kernel; "
        f"the smallest sufficient budget is {min_text} %"
    )
    if percent < 1:  # probably meant as a share
        message += f" (for a share of {percent:.6g}, give {100 * percent:.6g} %)"
    return message


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
    params = 0
    for group in position_groups(layers):
        first = group[0]
        params += first.lines * first.kernel_count * first.coordinates_per_element
        for layer in group:
            params += layer.lines * layer.kernel_count
    return params


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """Kernel counts of elements that exist already, for all layers to convert."""

    source: str  # "weights file weights.pth", for messages
    counts: Mapping[str, int]  # by any of the layer's names


def with_known_counts(
    drafts: Sequence[LayerPlan], known: LayerCounts, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """Return the drafts with the kernel counts of elements that exist already.

    Raises:
        PlanError: There are elements for other layers, or a rule states another count.
    """
    planned: set[str] = set()
    for draft in drafts:
        planned.update(draft.names)
    unplanned = [name for name in known.counts if name not in planned]
    if unplanned:
        reason_of = {skip.name: skip.reason for skip in skipped}
        raise PlanError(
            f"{known.source}: has elements for {shortened(unplanned[0])}, which would not be "
            f"converted: {reason_of.get(unplanned[0], 'the model has no such convolution')}"
        )
    counted = []
    for draft in drafts:
        known_counts = [known.counts[name] for name in draft.names if name in known.counts]
        count = known_counts[0] if known_counts else draft.kernel_count
        if draft.kernel_count not in (UNSOLVED, count):
            raise PlanError(
                f"{known.source}: {draft.name} has {count} elements in a kernel, "
                f"but rule {draft.rule!r} states {draft.kernel_count}"
            )
        counted.append(replace(draft, kernel_count=count))
    return counted
