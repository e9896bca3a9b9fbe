"""Drafts become whole layers: which share their positions, their kernel counts, and which module owns a tie group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from ..depthwise.geometry import size_text
from ..errors import PlanError, listed, shown
from ..networks.sites import Skipped
from ..networks.stages import common_parent
from ..options import Scope, Tie
from .budget import BudgetLayer, BudgetUnit, solve_counts
from .plan import LayerCounts, LayerPlan, TieGroup, taken_from

UNSOLVED = 0  # the kernel count that is still to be solved for; not one that can be stated
MODEL_UNIT = "model"  # the unit of the budget with scope "model"


def group_layers(drafts: Sequence[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Groups of drafts with one stage and one shape, by name.

    Their old kernels have one size and dilation too, so that all can start from the same grid.
    """
    by_key: dict[tuple[object, ...], list[LayerPlan]] = {}
    for draft in drafts:
        if draft.stage is not None:
            old = (draft.kernel_size, draft.dilation)
            key = (draft.stage, draft.position_shape, draft.dilated_size, draft.dense_axes, draft.interpolation, *old)
            by_key.setdefault(key, []).append(draft)
    groups = [members for members in by_key.values() if len(members) > 1]
    in_stage = Counter(members[0].stage for members in groups)
    named: dict[str, list[LayerPlan]] = {}
    for members in groups:
        first = members[0]
        name = str(first.stage)
        if in_stage[first.stage] > 1:
            name += f"/{first.out_channels}x{first.in_channels // first.groups}"
        if name in named:
            name += f"/{size_text(first.kernel_size)}"
        alike = sum(other == name or other.startswith(f"{name}/") for other in named)
        named[f"{name}/{alike + 1}" if alike else name] = members
    return named


def with_given_counts(
    drafts: Sequence[LayerPlan], given: LayerCounts, tie: Tie, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """The drafts with their counts; PlanError where drafts and counts are not of the same layers."""
    names = {name for draft in drafts for name in draft.names}
    for name in given.counts:
        if name not in names:
            reason = next((skip.reason for skip in skipped if skip.name == name), "the model has no such convolution")
            raise PlanError(f"{given.source}: has elements for {shown(name)}, which would not be converted: {reason}")
    missing = [draft.name for draft in drafts if not given.counts.keys() & set(draft.names)]
    if missing:
        raise PlanError(f"{given.source}: has no elements for {listed(missing, 1)}, which would be converted")
    counted = []
    for draft in drafts:
        count = next(given.counts[name] for name in draft.names if name in given.counts)
        if draft.kernel_count not in (UNSOLVED, count):
            stated = f"rule {draft.rule!r} states {draft.kernel_count}"
            raise PlanError(f"{given.source}: {draft.name} has {count} elements in a kernel, but {stated}")
        counted.append(replace(draft, kernel_count=count))
    # Layers that would be a tie group if their counts were the same.
    alike = group_layers([replace(draft, kernel_count=UNSOLVED) for draft in counted]) if tie == "stage" else {}
    count_of = {draft.name: draft.kernel_count for draft in counted}
    for group, members in alike.items():
        first, *others = [member.name for member in members]
        other = next((name for name in others if count_of[name] != count_of[first]), None)
        if other is not None:
            raise PlanError(
                f"{given.source}: layers of {group} cannot share positions, since their kernel counts differ: "
                f"{first} has {count_of[first]}, {other} has {count_of[other]}; use --tie none"
            )
    return counted


def with_counts(
    drafts: Sequence[LayerPlan], groups: dict[str, list[LayerPlan]], scope: Scope, share: Fraction
) -> tuple[tuple[LayerPlan, ...], tuple[BudgetUnit, ...]]:
    """The layers with their counts, stated or solved for, and the books of the budget."""
    group_of = {draft.name: name for name, members in groups.items() for draft in members}
    costs = []
    for draft in drafts:
        tie = group_of.get(draft.name)
        # A tie group has one count. With scope "layer", the group counts as one layer.
        unit = {"stage": draft.stage or draft.name, "layer": tie or draft.name}.get(scope, MODEL_UNIT)
        decided = {"unit": unit, "tie_group": tie, "given_count": draft.kernel_count or None}
        costs.append(BudgetLayer(**taken_from(draft, BudgetLayer) | decided))
    counts, units = solve_counts(costs, share)
    layers = [replace(draft, kernel_count=counts[draft.name], tie_group=group_of.get(draft.name)) for draft in drafts]
    return tuple(layers), units


def named_owners(groups: dict[str, list[LayerPlan]], layers: Sequence[LayerPlan]) -> tuple[TieGroup, ...]:
    """The tie groups, each on the lowest module that holds its layers, under names that no other group has there."""
    taken: Counter[str] = Counter()
    ties = []
    for name in groups:
        members = [layer for layer in layers if layer.tie_group == name]
        owner = common_parent([layer.name for layer in members])
        taken[owner] += 1
        suffix = f"_{taken[owner]}" if taken[owner] > 1 else ""
        parameters = {parameter: f"dcls_{parameter}{suffix}" for parameter in members[0].shared_parameters}
        ties.append(TieGroup(name=name, owner=owner, parameters=parameters, layers=tuple(x.name for x in members)))
    return tuple(ties)
