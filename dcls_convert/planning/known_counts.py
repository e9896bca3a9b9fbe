"""Give the layers of a plan the kernel counts of elements that exist already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..networks.sites import Skipped
from ..options import Tie
from ..text import short_list, shortened
from .counts import UNSOLVED
from .layer_plan import LayerPlan
from .tie_groups import check_counts_can_be_tied


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCounts:
    """Kernel counts of elements that exist already, for all layers to convert."""

    source: str  # "checkpoint weights.pth", for messages
    counts: Mapping[str, int]  # by the layer's name
    # True if scope "error" chose the counts: layers of one stage may differ and are then not tied.
    # False if the elements are trained: layers to be tied must have equal counts.
    by_error: bool = False


def with_known_counts(
    drafts: Sequence[LayerPlan], known: LayerCounts, tie: Tie, skipped: Sequence[Skipped]
) -> list[LayerPlan]:
    """Return the drafts with the kernel counts of elements that exist already.

    Raises:
        PlanError: The elements do not belong to exactly these layers, a rule states another count,
            or layers of a tie group have different counts.
    """
    _check_all_are_converted(known, drafts, skipped)
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
            f"{known.source}: has no elements for {short_list(missing, 1)}, "
            "which would be converted"
        )
    for draft in drafts:
        if draft.kernel_count not in (UNSOLVED, count_of[draft.name]):
            raise PlanError(
                f"{known.source}: {draft.name} has {count_of[draft.name]} elements in a kernel, "
                f"but rule {draft.rule!r} states {draft.kernel_count}"
            )
    if tie == "stage" and not known.by_error:
        check_counts_can_be_tied(drafts, count_of, known.source)
    return [replace(draft, kernel_count=count_of[draft.name]) for draft in drafts]


def _check_all_are_converted(
    known: LayerCounts, drafts: Sequence[LayerPlan], skipped: Sequence[Skipped]
) -> None:
    """Raise PlanError if there are elements for a layer that would not be converted."""
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
                f"{known.source}: has elements for {shortened(name)}, "
                f"which would not be converted: {reason}"
            )


def _known_count(draft: LayerPlan, known: LayerCounts) -> int | None:
    """Return the count stored under any of the layer's names, or None."""
    for name in draft.names:
        if name in known.counts:
            return known.counts[name]
    return None
