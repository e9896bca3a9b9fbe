"""Which layers share their positions, and the counts of elements that exist already."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..depthwise.geometry import size_text
from ..errors import PlanError, listed, shown
from ..networks.sites import Skipped
from ..options import Tie
from .budget import UNSOLVED
from .plan import LayerCounts, LayerPlan


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
    for name in (name for name in given.counts if name not in names):
        reason = next((skip.reason for skip in skipped if skip.name == name), "the model has no such convolution")
        raise PlanError(f"{given.source}: has elements for {shown(name)}, which would not be converted: {reason}")
    missing = [draft.name for draft in drafts if not given.counts.keys() & set(draft.names)]
    if missing:
        raise PlanError(f"{given.source}: has no elements for {listed(missing, 1)}, which would be converted")
    count_of = {draft.name: next(given.counts[n] for n in draft.names if n in given.counts) for draft in drafts}
    for draft in drafts:
        if draft.kernel_count not in (UNSOLVED, count_of[draft.name]):
            stated = f"rule {draft.rule!r} states {draft.kernel_count}"
            raise PlanError(
                f"{given.source}: {draft.name} has {count_of[draft.name]} elements in a kernel, but {stated}"
            )
    # Layers that would be a tie group if their counts were the same.
    alike = group_layers([replace(draft, kernel_count=UNSOLVED) for draft in drafts]) if tie == "stage" else {}
    for group, (first, *others) in alike.items():
        for other in others:
            if count_of[other.name] != count_of[first.name]:
                raise PlanError(
                    f"{given.source}: layers of {group} cannot share positions, since their kernel counts differ: "
                    f"{first.name} has {count_of[first.name]}, {other.name} has {count_of[other.name]}; use --tie none"
                )
    return [replace(draft, kernel_count=count_of[draft.name]) for draft in drafts]
