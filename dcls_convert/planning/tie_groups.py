"""Decide which layers of a plan share their positions.

Kernel counts may still be UNSOLVED.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..geometry import size_text
from .layer_plan import LayerPlan, position_groups


def with_tie_groups(layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return the layers with the names of their tie groups.

    A group has at least two layers, of the same stage, shape, window and interpolation. The old
    kernels have the same size and dilation, so that one grid of initial positions fits all layers.
    Trained and frozen layers are never in one group: trained positions would change frozen kernels.
    """
    by_key: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        if layer.stage is None:
            continue
        key = (
            layer.stage,
            layer.position_shape,
            layer.dilated_size,
            layer.dense_axes,
            layer.grow,
            layer.interpolation,
            layer.kernel_size,
            layer.dilation,
            layer.frozen,
        )
        by_key.setdefault(key, []).append(layer)
    groups = [members for members in by_key.values() if len(members) > 1]
    groups_in_stage = Counter(members[0].stage for members in groups)
    group_names: list[str] = []
    tied: dict[str, LayerPlan] = {}
    for first, *others in groups:
        is_alone = groups_in_stage[first.stage] == 1
        group_names.append(_group_name(first, group_names, alone_in_stage=is_alone))
        tied[first.name] = replace(first, tie_group=group_names[-1])
        for member in others:
            tied[member.name] = replace(member, tie_group=group_names[-1])
    return [tied.get(layer.name, layer) for layer in layers]


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
    unnumbered = name
    number = 1
    while name in used_names:
        number += 1
        name = f"{unnumbered}/{number}"
    return name


def without_lone_ties(layers: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Remove the tie group of each layer that shares its positions with no other layer."""
    alone = {first.name for first, *others in position_groups(layers) if not others}
    untied = []
    for layer in layers:
        if layer.name in alone:
            layer = replace(layer, tie_group=None)
        untied.append(layer)
    return untied
