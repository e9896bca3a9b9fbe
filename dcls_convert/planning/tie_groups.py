"""Which layers of a plan share their positions.

A draft is a LayerPlan that has no tie group yet, and whose kernel count may still be UNSOLVED.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..depthwise.geometry import size_text
from .plan import LayerPlan


def with_tie_groups(drafts: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The drafts, with the names of their tie groups."""
    group_of: dict[str, str] = {}
    for group, members in group_layers(drafts).items():
        for member in members:
            group_of[member.name] = group
    return [replace(draft, tie_group=group_of.get(draft.name)) for draft in drafts]


def group_layers(drafts: Sequence[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Drafts that can share positions, two or more, by a unique name of the group.

    They have the same stage, shape, window and interpolation, and the same geometry of the old
    kernel, so that one grid of first positions fits them all.
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
        )
        by_key.setdefault(key, []).append(draft)
    groups = [members for members in by_key.values() if len(members) > 1]
    groups_in_stage: Counter[str | None] = Counter()
    for members in groups:
        groups_in_stage[members[0].stage] += 1
    named: dict[str, list[LayerPlan]] = {}
    for members in groups:
        first = members[0]
        name = _group_name(first, named, alone_in_stage=groups_in_stage[first.stage] == 1)
        named[name] = members
    return named


def _group_name(first: LayerPlan, taken: Mapping[str, object], *, alone_in_stage: bool) -> str:
    """The stage's name, with the channels, the kernel size and a number as far as it needs them."""
    name = str(first.stage)
    if not alone_in_stage:
        name += f"/{first.out_channels}x{first.in_channels // first.groups}"
    if name in taken:
        name += f"/{size_text(first.kernel_size)}"
    same_name = 0  # groups that have this name, with or without a number behind it
    for other in taken:
        if other == name or other.startswith(f"{name}/"):
            same_name += 1
    if same_name:
        name += f"/{same_name + 1}"
    return name
