"""The window of each new layer, and the size that is recommended for a model."""

import math
import statistics
from collections.abc import Mapping, Sequence

from ..depthwise.geometry import (
    Padding,
    check_cells,
    check_window,
    extent,
    grown_padding,
    padded_cells,
    size_text,
)
from ..errors import PlanError
from ..networks.sites import ConvSite, ModelConvs, OldConv
from ..options import MOST_SLOWER, MOST_WINDOW
from .rules import Rule, RuleSet

SIZES_TO_TRY = 9  # windows that `larger_sizes` gives


def recommended_size(convs: ModelConvs, rules: RuleSet, rule_of: Mapping[str, int]) -> int | None:
    """The window for dilated size "auto"; None if the rules state all sizes."""
    if rules.defaults.dilated_size:
        return None
    converted: list[tuple[ConvSite, Rule]] = []
    without_size: list[ConvSite] = []
    for site in convs.sites:
        if site.name in rule_of:
            rule = rules.rules[rule_of[site.name]]
            converted.append((site, rule))
            if not rule.dilated_size:
                without_size.append(site)
    if not without_size:
        return None
    sizes = larger_sizes(without_size)
    most_added = (convs.macs or 0) * MOST_SLOWER / 100
    recommended = sizes[0]
    for size in sizes:
        if size <= MOST_WINDOW and _added_macs(converted, size) <= most_added:
            recommended = size
    return recommended


def larger_sizes(convs: Sequence[OldConv]) -> list[int]:
    """Nine windows for the kernels, each two cells larger than the one before.

    All have the parity that most kernels have. The first one is the smallest that holds every
    kernel of this parity and is larger than at least one of them.
    """
    extents = [max(map(extent, conv.kernel_size, conv.dilation)) for conv in convs]
    parity = statistics.mode(size % 2 for size in extents)
    of_this_parity = [size for size in extents if size % 2 == parity]
    first = max(*of_this_parity, min(of_this_parity) + 2)
    return list(range(first, first + 2 * SIZES_TO_TRY, 2))


def _added_macs(converted: Sequence[tuple[ConvSite, Rule]], size: int) -> float:
    """MACs that the new windows add, with this size where the rule states none.

    Sites that cannot take the size add nothing. Infinite if the MACs of a site are not known.
    """
    added = 0
    for site, rule in converted:
        try:
            window, _ = choose_window(site, rule.dilated_size or size, rule)
        except PlanError:
            continue
        before = site.macs(site.kernel_size)
        after = site.macs(window)
        if before is None or after is None:
            return math.inf
        added += after - before
    return added


def choose_window(
    site: ConvSite, size: int | Sequence[int], rule: Rule
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The window of the new layer, and its dense axes.

    Raises:
        PlanError: The site cannot take this size.
    """
    if isinstance(size, int):
        dense_axes = _dense_axes(site, site.kernel_size, rule)
        sides = list(site.kernel_size)
        for axis in range(site.dims):
            if axis not in dense_axes:
                sides[axis] = size
        window = tuple(sides)
    else:
        window = tuple(size)
        if len(window) != site.dims:
            raise PlanError(
                f"the size {size_text(window)} is for {len(window)}-D, "
                f"this convolution is {site.dims}-D"
            )
        dense_axes = _dense_axes(site, window, rule)
    check_window(site.kernel_size, site.dilation, window, dense_axes)
    padding = grown_padding(site.padding, site.kernel_size, site.dilation, window, site.stride)
    check_cells(site.out_channels * site.in_channels // site.groups, window)
    _check_padding(site, window, padding)
    return window, dense_axes


def _dense_axes(site: ConvSite, sides: Sequence[int], rule: Rule) -> tuple[int, ...]:
    """Axes of side 1 beside a longer one, and those that the rule names."""
    dense = set(rule.dense_axes or ())
    longest = max(sides)
    for axis, side in enumerate(sides):
        if side == 1 and longest > 1:
            dense.add(axis)
    if max(dense, default=0) >= site.dims:
        raise PlanError(
            f"the rule's dense axes {rule.dense_axes} are not all axes "
            f"of a {site.dims}-D convolution"
        )
    if len(dense) == site.dims:
        raise PlanError("all its axes are dense; nothing would be learnt")
    return tuple(sorted(dense))


def _check_padding(site: ConvSite, window: Sequence[int], padding: Padding) -> None:
    """Refuse reflect and circular padding that is wider than torch allows for the input."""
    if site.padding_mode not in ("reflect", "circular") or site.input_extent is None:
        return
    cells = padded_cells(padding, site.input_extent, window, site.stride)
    for before_and_after, side in zip(cells, site.input_extent, strict=True):
        width = max(before_and_after)
        widest = side
        if site.padding_mode == "reflect":  # which does not repeat the border
            widest = side - 1
        if width > widest:
            raise PlanError(
                f"{site.padding_mode} padding of {width} does not fit its input of {side}"
            )
