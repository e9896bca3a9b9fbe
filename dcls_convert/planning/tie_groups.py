"""Decide which layers of a plan share their positions.

A draft is a LayerPlan that has no tie group yet, and whose kernel count may still be UNSOLVED.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..errors import PlanError
from ..geometry import size_text
from .counts import UNSOLVED
from .layer_plan import LayerPlan, position_groups


def with_tie_groups(drafts: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return the drafts with the names of their tie groups."""
    group_of: dict[str, str] = {}
    for group, members in group_layers(drafts).items():
        for member in members:
            group_of[member.name] = group
    return [replace(draft, tie_group=group_of.get(draft.name)) for draft in drafts]


def group_layers(drafts: Sequence[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Group the drafts that can share positions, by a unique name of the group.

    A group has at least two drafts, of the same stage, shape, window and interpolation. Their old
    kernels have the same size and dilation, so that one grid of initial positions fits them all.
    Either all are trained or none: trained positions would change frozen kernels.
    """
    by_key: dict[tuple[object, ...], list[LayerPlan]] = {}
    for draft in drafts:
        if draft.stage is None:
            continue
        key = (
            draft.stage,
            draft.position_shape,
            draft.dilated_size,
            draft.dense_axes,
            draft.interpolation,
            draft.kernel_size,
            draft.dilation,
            draft.frozen,
        )
        by_key.setdefault(key, []).append(draft)
    groups = [members for members in by_key.values() if len(members) > 1]
    groups_in_stage: Counter[str | None] = Counter()
    for members in groups:
        groups_in_stage[members[0].stage] += 1
    members_of: dict[str, list[LayerPlan]] = {}
    for members in groups:
        first = members[0]
        name = _group_name(first, members_of, alone_in_stage=groups_in_stage[first.stage] == 1)
        members_of[name] = members
    return members_of


def _group_name(first: LayerPlan, used_names: Collection[str], *, alone_in_stage: bool) -> str:
    """Return an unused name: "s", "s/64x1", "s/64x1/7x7", or "s/64x1/7x7/2".

    "s" is the stage, which suffices for its only group. Channels, kernel size and a number are
    added as needed.
    """
    name = str(first.stage)
    if not alone_in_stage:
        name += f"/{first.out_channels}x{first.in_channels // first.groups}"
    if name in used_names:
        name += f"/{size_text(first.kernel_size)}"
    same_name_count = 0  # groups with this name, with or without a number after it
    for used_name in used_names:
        if used_name == name or used_name.startswith(f"{name}/"):
            same_name_count += 1
    if same_name_count:
        name += f"/{same_name_count + 1}"
    return name


def check_counts_can_be_tied(
    drafts: Sequence[LayerPlan], count_of: Mapping[str, int], source: str
) -> None:
    """Raise PlanError if layers that could share positions have different counts."""
    without_counts = [replace(draft, kernel_count=UNSOLVED) for draft in drafts]
    for group, (first, *others) in group_layers(without_counts).items():
        count = count_of[first.name]
        for other in others:
            if count_of[other.name] != count:
                raise PlanError(
                    f"{source}: layers of {group} cannot share positions, "
                    f"since their kernel counts differ: {first.name} has {count}, "
                    f"{other.name} has {count_of[other.name]}; use tie 'none'"
                )


def without_lone_ties(layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Remove the tie group of each layer that shares its positions with no other layer."""
    alone = {first.name for first, *others in position_groups(layers) if not others}
    untied = []
    for layer in layers:
        if layer.name in alone:
            layer = replace(layer, tie_group=None)
        untied.append(layer)
    return untied
