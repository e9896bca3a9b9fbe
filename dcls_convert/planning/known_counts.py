"""A plan for elements that exist already, whose kernel counts it takes over."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import PlanError, listed, shown
from ..networks.sites import Skipped
from ..options import Tie
from .budget import UNSOLVED
from .plan import LayerCounts, LayerPlan
from .tie_groups import group_layers


def with_known_counts(
    drafts: Sequence[LayerPlan], known: LayerCounts, tie: Tie, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """The drafts with the kernel counts of elements that exist already.

    Raises:
        PlanError: The elements are not those of exactly these layers, or contradict a rule, or
            layers of a tie group have different counts.
    """
    names: set[str] = set()
    for draft in drafts:
        names.update(draft.names)
    for name in known.counts:
        if name not in names:
            reason = "the model has no such convolution"
            for skip in skipped:
                if skip.name == name:
                    reason = skip.reason
            raise PlanError(
                f"{known.source}: has elements for {shown(name)}, "
                f"which would not be converted: {reason}"
            )
    count_of: dict[str, int] = {}
    missing: list[str] = []
    for draft in drafts:
        count = _known_count(draft, known)
        if count is None:
            missing.append(draft.name)
        else:
            count_of[draft.name] = count
    if missing:
        raise PlanError(
            f"{known.source}: has no elements for {listed(missing, 1)}, which would be converted"
        )
    for draft in drafts:
        if draft.kernel_count not in (UNSOLVED, count_of[draft.name]):
            raise PlanError(
                f"{known.source}: {draft.name} has {count_of[draft.name]} elements in a kernel, "
                f"but rule {draft.rule!r} states {draft.kernel_count}"
            )
    if tie == "stage" and not known.solved:
        _check_counts_can_be_tied(drafts, count_of, known.source)
    return [replace(draft, kernel_count=count_of[draft.name]) for draft in drafts]


def _known_count(draft: LayerPlan, known: LayerCounts) -> int | None:
    """The count stored under any of the layer's names."""
    for name in draft.names:
        if name in known.counts:
            return known.counts[name]
    return None


def _check_counts_can_be_tied(
    drafts: Sequence[LayerPlan], count_of: Mapping[str, int], source: str
) -> None:
    """Refuse different counts for layers that would be a tie group if their counts were equal."""
    without_counts = [replace(draft, kernel_count=UNSOLVED) for draft in drafts]
    for group, (first, *others) in group_layers(without_counts).items():
        count = count_of[first.name]
        for other in others:
            if count_of[other.name] != count:
                raise PlanError(
                    f"{source}: layers of {group} cannot share positions, "
                    f"since their kernel counts differ: {first.name} has {count}, "
                    f"{other.name} has {count_of[other.name]}; use --tie none"
                )
