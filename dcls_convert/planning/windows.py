"""Choose the window of each new layer, and recommend a size for a model."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..geometry import (
    DYNAMIC_SAME,
    Grow,
    all_new_cells,
    along_learnt_axes,
    check_cells,
    check_window,
    grown_padding,
    keeps_centre,
    padded_cells,
    padding_with_new_cells,
    position_limits,
    size_text,
    static_padding,
)
from ..networks.sites import ONE_SIDE, ConvSite, OldConv
from ..options import MAX_ADDED_COST_PERCENT, MAX_WINDOW, MIN_GROWTH
from ..text import join_with_and, short_list
from .claims import Claim
from .layer_plan import LayerPlan, check_layer
from .rules import Rule

ANYWAY = "A rule with 'grow' or 'padding: any' converts it anyway"
IF_CAUSAL = "if the network is causal, 'grow: back' in a rule lets it grow to one side"


class NoWindowError(PlanError):
    """The kernel of a convolution must not grow, whatever the size of the window."""


def recommended_size(claims: Sequence[Claim], macs: int | None) -> str | None:
    """Return the growth for dilated size "auto", such as "+10"; None if the rules state all sizes.

    It is the largest growth that

    - adds at most MAX_ADDED_COST_PERCENT to the model's MACs,
    - makes no window larger than MAX_WINDOW,
    - lets at least half of the windows fit their maps, so that no cell meets only padding,
    - fits every layer that the smallest growth fits.

    If there is none, it is the smallest growth.
    """
    if all(claim.size(None) for claim in claims):
        return None
    max_added_macs = (macs or 0) * MAX_ADDED_COST_PERCENT / 100
    at_min_growth = _try_growth(claims, MIN_GROWTH)
    recommended = MIN_GROWTH
    for growth in range(MIN_GROWTH, MAX_WINDOW, 2):
        grown = _try_growth(claims, growth)
        # A layer that refuses a growth adds no MACs: it would make larger growths look cheap.
        fits = grown.layers >= at_min_growth.layers and grown.longest_side <= MAX_WINDOW
        if fits and not grown.mostly_beyond_maps and grown.added_macs <= max_added_macs:
            recommended = growth
    return f"+{recommended}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grown:
    """The windows and the added cost after a growth of all windows."""

    layers: int  # number of layers that can take their size
    # These two are about windows whose size no rule states: whether most of them have cells that
    # meet only padding, and their longest learnt side.
    mostly_beyond_maps: bool
    longest_side: int
    added_macs: float  # by all windows; infinity if the MACs of a site are not known


def _try_growth(claims: Sequence[Claim], growth: int) -> _Grown:
    """Try a growth for the sites whose rules state no size."""
    layers = 0
    grown = 0
    beyond_map = 0
    longest_side = 0
    added_macs = 0.0
    for claim in claims:
        site = claim.site
        try:
            window, dense_axes, grow = choose_window(claim, f"+{growth}")
        except PlanError:
            continue
        layers += 1
        if not claim.rule.dilated_size:
            learnt_size = along_learnt_axes(window, dense_axes)
            longest_side = max(longest_side, *learnt_size)
            grown += 1
            useful = site.useful_limits(window, dense_axes, grow)
            beyond_map += useful != list(map(position_limits, learnt_size))
        before = site.macs(site.kernel_size)
        after = site.macs(window)
        if before is None or after is None:
            added_macs = math.inf
        else:
            added_macs += after - before
    return _Grown(
        layers=layers,
        mostly_beyond_maps=2 * beyond_map > grown,
        longest_side=longest_side,
        added_macs=added_macs,
    )


def choose_window(
    claim: Claim, size: int | Sequence[int] | str | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Grow, ...]]:
    """Choose the window of the new layer, its dense axes, and how it grows.

    Args:
        claim: The old convolution, and its rule, which may state the size, name dense axes, and say
            how windows grow.
        size: The size if the rule states none: cells of every side, cells of each side, or a growth
            such as "+4". None if the rule or its file states a size.

    Returns:
        The window, the dense axes, and how the window grows along each axis (see `LayerPlan.grow`).

    Raises:
        PlanError: The site cannot take this size.
    """
    site = claim.site
    window, dense_axes = _window(site, claim.size(size), claim.rule)
    sides = [_side_to_grow(claim, axis, window) for axis in range(site.dims)]
    grow = () if set(sides) == {"both"} else tuple(sides)
    if site.why_attributes_are_needed is not None and not grow and _growing_axes(site, window):
        raise NoWindowError(
            f"{site.why_attributes_are_needed}; {IF_CAUSAL}, which keeps the attributes"
        )
    check_window(site.kernel_size, site.dilation, window, dense_axes, grow)
    check_cells(site.out_channels * site.in_channels // site.groups, window)
    _check_padding(site, window, grow)
    return window, dense_axes, grow


def with_other_window(layer: LayerPlan, size: int | Sequence[int] | str) -> LayerPlan:
    """Return a planned layer with another window, which grows to the same sides as the present one.

    Args:
        layer: The plan of a layer that has elements already.
        size: As in `choose_window`. A growth counts from the old kernel. Dense axes stay.

    Raises:
        PlanError: The layer cannot have this window.
    """
    if not isinstance(size, int | str) and len(size) != layer.dims:
        raise PlanError(
            f"{layer.name}: the size {size_text(size)} is for {len(size)}-D, "
            f"this layer is {layer.dims}-D"
        )
    sides = list(layer.dilated_size)
    for axis in layer.learnt_axes:
        if isinstance(size, int):
            sides[axis] = size
        elif isinstance(size, str):
            sides[axis] = layer.extents[axis] + int(size)
        else:
            sides[axis] = size[axis]
    if not isinstance(size, int | str) and list(size) != sides:
        axes = ", ".join(map(str, layer.dense_axes))
        raise PlanError(
            f"{layer.name}: nothing is learnt along axis {axes}, so its window "
            f"{size_text(layer.dilated_size)} cannot grow there; use {size_text(sides)}"
        )
    changed = replace(layer, dilated_size=tuple(sides))
    check_layer(changed)
    try:
        _check_padding(layer, sides, layer.grow)
    except PlanError as error:
        raise PlanError(f"{layer.name}: {error}") from None
    return changed


def window_to_try(claim: Claim, size: int | Sequence[int] | str) -> tuple[int, ...]:
    """Return the least window of at least this size that can grow to both sides.

    A measurement of the network with this window shows whether the window may grow to both sides.
    Raises PlanError as `choose_window` does.
    """
    site = claim.site
    window, dense_axes = _window(site, claim.size(size), claim.rule)
    sides = list(window)
    for axis in _growing_axes(site, window):
        sides[axis] += (sides[axis] - site.extents[axis]) % 2
    check_window(site.kernel_size, site.dilation, sides, dense_axes)
    check_cells(site.out_channels * site.in_channels // site.groups, sides)
    return tuple(sides)


def _window(
    site: ConvSite, size: int | Sequence[int] | str, rule: Rule
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the window for a stated size, and its dense axes."""
    if isinstance(size, int | str):
        dense_axes = _dense_axes(site, site.kernel_size, rule)
        sides = list(site.kernel_size)
        for axis in range(site.dims):
            if axis in dense_axes:
                continue
            if isinstance(size, int):
                sides[axis] = size
            else:
                sides[axis] = site.extents[axis] + int(size)
        return tuple(sides), dense_axes
    # Every side is stated, so a side of 1 may grow: the window says which axes are dense.
    window = tuple(size)
    if len(window) != site.dims:
        raise PlanError(
            f"the size {size_text(window)} is for {len(window)}-D, "
            f"this convolution is {site.dims}-D"
        )
    return window, _dense_axes(site, window, rule)


def _growing_axes(site: ConvSite, window: Sequence[int]) -> list[int]:
    return [axis for axis, old in enumerate(site.extents) if window[axis] > old]


def _side_to_grow(claim: Claim, axis: int, window: Sequence[int]) -> Grow:
    """Return how a window grows along an axis: as the rule says, or else as measured.

    Raises:
        NoWindowError: The window must not grow.
    """
    site = claim.site
    if axis not in _growing_axes(site, window):
        return "both"
    if claim.rule.grow is not None:
        return _stated_side(site, axis, claim.rule)
    if claim.rule.padding == "any":
        return "both"
    where = "" if site.dims == 1 else f"along axis {axis}, "
    limit = claim.growth_limits.get(axis)
    if limit is None:
        reason = _why_off_centre(site, axis)
        # If outputs look to one side along another axis, other code pads the map. Whether that code
        # also pads along this axis is not known, but outputs look to both sides along this axis.
        is_padded_elsewhere = any(other.side for other in claim.growth_limits.values())
        # `choose_window` has a better reason where attributes are read.
        is_read = site.why_attributes_are_needed is not None
        if reason is not None and not is_padded_elsewhere and not is_read:
            raise NoWindowError(f"{where}{reason}. {ANYWAY}; {IF_CAUSAL}")
        return "both"
    if limit.side is None:
        too = "; a window that grows to one side would, too" if limit.reason == ONE_SIDE else ""
        raise NoWindowError(f"{where}{limit.reason}{too}. {ANYWAY}")
    return limit.side


def _stated_side(site: ConvSite, axis: int, rule: Rule) -> Grow:
    """Return how a rule says that a window grows along an axis."""
    if isinstance(rule.grow, str):
        return rule.grow
    assert rule.grow is not None
    if len(rule.grow) != site.dims:
        raise PlanError(
            f"the rule says how to grow along {len(rule.grow)} axes, "
            f"this convolution is {site.dims}-D"
        )
    return rule.grow[axis]


def _why_off_centre(site: ConvSite, axis: int) -> str | None:
    """Return a reason if padding does not centre the kernel along an axis; None if it does.

    Padding that is off centre, here or in other code, keeps out inputs that the kernel must not
    read: later times, or a neighbouring patch.
    """
    if site.padding in ("same", DYNAMIC_SAME):
        return None
    before, after = static_padding(site.padding, site.extents)[axis]
    if keeps_centre((before, after), site.extents[axis], site.stride[axis]):
        return None
    cells = str(before) if before == after else f"{before} and {after}"
    return (
        f"its padding of {cells} does not centre its kernel of {site.extents[axis]}, so a larger "
        "window would read inputs that the padding keeps out (later times, or a neighbouring tile)"
    )


def _dense_axes(site: ConvSite, sides: Sequence[int], rule: Rule) -> tuple[int, ...]:
    """Return the axes that the rule names, and axes of side 1 if another side is longer."""
    dense = set(rule.dense_axes or ())
    longest = max(sides)
    for axis, side in enumerate(sides):
        if side == 1 and longest > 1:
            dense.add(axis)
    if max(dense, default=0) >= site.dims:
        raise PlanError(
            f"the rule names dense axes {rule.dense_axes}, but a {site.dims}-D convolution "
            f"has only axes 0 to {site.dims - 1}"
        )
    if len(dense) == site.dims:
        raise PlanError("all its axes are dense; nothing would be learnt")
    return tuple(sorted(dense))


def _check_padding(site: OldConv, window: Sequence[int], grow: Sequence[Grow]) -> None:
    """Raise PlanError for padding that a window cannot have.

    A window cannot have reflect or circular padding that is wider than torch allows for the input.
    Nor can it have dynamic SAME padding if the kernel is smaller than its stride, or if the window
    grows to one side.
    """
    for width, least, side in _wide_paddings(site, window, grow):
        if side < least:
            raise PlanError(
                f"{site.padding_mode} padding of {width} does not fit its input of {side}"
            )


def _wide_paddings(
    site: OldConv, window: Sequence[int], grow: Sequence[Grow]
) -> list[tuple[int, int, int]]:
    """Return the width of reflect or circular padding, the least map side, and the map's side.

    There is one tuple for each axis. The list is empty for other padding modes, and if the map's
    size is not known.
    """
    padding = grown_padding(
        site.padding, site.kernel_size, site.dilation, window, site.stride, grow
    )
    if site.padding_mode not in ("reflect", "circular") or site.input_extent is None:
        return []
    border = int(site.padding_mode == "reflect")  # reflection does not repeat the border
    extents = site.extents if grow else window
    cells = padded_cells(padding, site.input_extent, extents, site.stride)
    new = all_new_cells(window, extents, grow)
    by_mode, _ = padding_with_new_cells(cells, new, site.padding_mode)
    widths = [max(before_and_after) for before_and_after in by_mode]
    return [
        (width, width + border, side) for width, side in zip(widths, site.input_extent, strict=True)
    ]


def notes_on_windows(layers: Sequence[LayerPlan]) -> list[str]:
    """Return what users should know about windows; layers with the same note share a sentence."""
    names_of: dict[str, list[str]] = {}
    for layer in layers:
        window = layer.dilated_size
        paddings = _wide_paddings(layer, window, layer.grow)
        sides = [side for _, _, side in paddings]
        if paddings and any(map(operator.gt, window, sides)):
            least = [cells for _, cells, _ in paddings]
            text = (
                f"the window {size_text(window)} with {layer.padding_mode} padding is larger than "
                f"the map of {size_text(sides)}; torch fails for maps below {size_text(least)}"
            )
            names_of.setdefault(text, []).append(layer.name)
        if layer.grow:
            text = (
                "if other code keeps past steps for these layers, as for streaming, it must now "
                "keep as many as the window has, less one"
            )
            names_of.setdefault(text, []).append(layer.name)
    return [f"{short_list(names)}: {text}." for text, names in names_of.items()]


def notes_on_classes(sites: Sequence[ConvSite]) -> list[str]:
    """Return what converted convolutions lose; convolutions with the same loss share a sentence."""
    names_of: dict[str, list[str]] = {}
    for site in sites:
        if site.missing_members:
            members = join_with_and(site.missing_members)
            text = f"the class {site.type} has {members}, which the DCLS layer lacks"
            names_of.setdefault(text, []).append(site.name)
    return [f"{short_list(names)}: {text}." for text, names in names_of.items()]
