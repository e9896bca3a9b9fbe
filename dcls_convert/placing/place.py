"""Make the DCLS layers of a plan, and put them into the model.

This module makes the structure; `starts/` finds the values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import all_new_cells
from ..layers.conv_classes import (
    CONV_CLASSES,
    PLAIN,
    Conv,
    find_traits,
    settings_of,
    why_not_replaceable,
)
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..layers.position_parameters import exclude_from_weight_decay_
from ..networks.timm_notes import change_marked_plan_, mark_converted_
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan, DraftPlan

PLAN_ATTRIBUTE = "dcls_plan"  # on a converted model; copies and pickles keep it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConvGroup:
    """Convolutions whose layers will share positions, or a single convolution."""

    layer_plans: tuple[LayerPlan, ...]
    convs: tuple[Conv, ...]

    @property
    def title(self) -> str:
        """Name for progress messages: the stage of a tie group, or the name of a single layer."""
        first = self.layer_plans[0]
        if first.tie_group is None:
            return first.name
        return first.stage or first.name

    def effective_kernels(self) -> list[Tensor]:
        """Return the kernels with which the old convolutions convolve: (O, I, *kernel size) each.

        They differ from the weights if a convolution standardises its weights.
        """
        kernels = []
        for conv in self.convs:
            traits = find_traits(conv) or PLAIN
            kernels.append(traits.effective_weight(conv, conv.weight.detach()))
        return kernels

    def layers_on_meta(self) -> list[DclsConvNd]:
        """Return layers without values, which show how the new layers pad their input.

        They have one element, since padding does not depend on the number of elements.
        """
        layers = []
        for plan, conv in zip(self.layer_plans, self.convs, strict=True):
            layers.append(
                DCLS_LAYERS[plan.dims].on_meta(
                    settings_of(conv),
                    1,
                    plan.dilated_size,
                    plan.interpolation,
                    plan.dense_axes,
                    plan.grow,
                )
            )
        return layers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerGroup(ConvGroup):
    """New layers that share positions, or a single layer, and the convolutions to replace."""

    layers: tuple[DclsConvNd, ...]  # all but the first are tied to the first

    def kernel_errors(self) -> dict[str, float]:
        """Return |new - old| / |old| of the kernels as they are convolved, by layer name.

        The result is empty on the meta device.
        """
        old_kernels = self.effective_kernels()
        if old_kernels[0].is_meta:
            return {}
        first = self.layer_plans[0]
        old_cells = []  # where the old kernel's cells lie in the window, along each axis
        new = all_new_cells(first.dilated_size, first.extents, first.grow_of_axes)
        for (before, after), size, spacing in zip(
            new, first.dilated_size, first.dilation, strict=True
        ):
            old_cells.append(slice(before, size - after, spacing))
        errors = {}
        for plan, old, layer in zip(self.layer_plans, old_kernels, self.layers, strict=True):
            difference = layer.kernel().to(torch.promote_types(old.dtype, torch.float32))
            difference[:, :, *old_cells] -= old
            norm = float(old.float().norm())
            error = 0.0
            if norm != 0:
                error = float(difference.norm()) / norm
            errors[plan.name] = error
        return errors


def find_groups(model: nn.Module, plan: DraftPlan) -> list[ConvGroup]:
    """Return the convolutions that the plan replaces, grouped by layers that share positions.

    Raises:
        PlanError: The model does not have the plan's convolutions, or one of them cannot be
            replaced.
    """
    conv_of = find_planned_convs(model, plan)
    groups = []
    for plans in position_groups(plan.layers):
        convs = tuple(conv_of[layer_plan.name] for layer_plan in plans)
        groups.append(ConvGroup(layer_plans=tuple(plans), convs=convs))
    return groups


def make_layers(model: nn.Module, plan: ConversionPlan) -> tuple[LayerGroup, ...]:
    """Make all new layers of the plan, without values, and not in the model yet.

    Raises:
        PlanError: See `find_groups`.
    """
    groups = []
    for group in find_groups(model, plan):
        first, *others = map(_make_layer, group.layer_plans, group.convs)
        for layer in others:
            layer.tie_(first)
        groups.append(
            LayerGroup(layer_plans=group.layer_plans, convs=group.convs, layers=(first, *others))
        )
    return tuple(groups)


def _make_layer(plan: LayerPlan, conv: Conv) -> DclsConvNd:
    layer_class = DCLS_LAYERS[len(plan.dilated_size)]
    return layer_class.from_conv_without_values(
        conv,
        plan.kernel_count,
        plan.dilated_size,
        plan.interpolation,
        plan.dense_axes,
        plan.grow,
    )


def find_planned_convs(model: nn.Module, plan: DraftPlan) -> dict[str, Conv]:
    """Return the convolutions that the plan replaces, by the names of its layers.

    Raises:
        PlanError: The model does not have the convolutions as planned, or one of them cannot be
            replaced.
    """
    convs: dict[str, Conv] = {}
    for layer in plan.layers:
        conv = _find_conv(model, layer)
        if conv in convs.values():
            raise PlanError(f"{layer.name}: the model has one module for several layers")
        convs[layer.name] = conv
    return convs


def _find_conv(model: nn.Module, layer: LayerPlan) -> Conv:
    """Return the convolution that a layer's plan replaces.

    Raises:
        PlanError: The convolution is not found under all its names, cannot be replaced without
            loss, or differs from the plan.
    """
    try:
        conv, *aliases = [model.get_submodule(name) for name in layer.names]
    except AttributeError as error:
        raise PlanError(f"{layer.name}: the plan is for another model: {error}") from error
    if not isinstance(conv, CONV_CLASSES[len(layer.kernel_size)]) or not layer.name:
        raise PlanError(
            f"{layer.name}: is a {type(conv).__name__}, where the plan has a convolution"
        )
    if any(alias is not conv for alias in aliases):
        raise PlanError(
            f"{layer.name}: the plan also lists it as {', '.join(layer.names[1:])}, "
            "where the model has another module"
        )
    if reason := why_not_replaceable(conv):
        raise PlanError(f"{layer.name}: {reason}")
    difference = settings_of(conv).describe_difference(layer)
    if difference is not None:
        raise PlanError(f"{layer.name}: {difference}")
    return conv


def place_layers_without_values_(model: nn.Module, plan: ConversionPlan) -> None:
    """Replace every convolution of the plan by its DCLS layer, without values.

    If the plan is folded, plain convolutions of the window's size are placed instead.
    """
    insert_layers_(
        model,
        plan,
        make_layers(model, plan),
        make_plain_conv=DclsConvNd.plain_conv_without_values,
    )


def insert_layers_(
    model: nn.Module,
    plan: ConversionPlan,
    groups: Sequence[LayerGroup],
    *,
    make_plain_conv: Callable[[DclsConvNd], nn.Module] = DclsConvNd.fuse,
) -> None:
    """Put layers into the model.

    Besides the layers, the model keeps:
    - names that `no_weight_decay` returns (`layers/position_parameters.py`);
    - the plan, by `note_plan_`.

    A folded plan leaves plain convolutions.

    Args:
        model: Changed in place.
        plan: If it is folded, the layers' plain convolutions are placed instead.
        groups: From `make_layers`.
        make_plain_conv: Makes the plain convolution of a layer; by default, with its kernel.
    """
    for group in groups:
        for layer_plan, layer in zip(group.layer_plans, group.layers, strict=True):
            module: nn.Module = layer
            if plan.folded:
                module = make_plain_conv(layer)
            for name in layer_plan.names:
                model.set_submodule(name, module)
    if not plan.folded:
        exclude_from_weight_decay_(model)
    note_plan_(model, plan)


def note_plan_(model: nn.Module, plan: ConversionPlan) -> None:
    """Note a plan on the model that it has converted, for `noted_plan` and for timm's savers."""
    vars(model)[PLAN_ATTRIBUTE] = plan.to_dict()
    args = None if plan.model is None else timm_model_args(plan)
    mark_converted_(model, args, plan.input_size)


def note_other_windows_(model: nn.Module, plan: ConversionPlan) -> None:
    """Note the plan with other windows on a converted model; timm's other notes stay."""
    noted = plan.to_dict()
    vars(model)[PLAN_ATTRIBUTE] = noted
    change_marked_plan_(model, noted)


def noted_plan(model: nn.Module) -> ConversionPlan | None:
    """Return the plan that was noted on a converted model; None if there is none."""
    noted = vars(model).get(PLAN_ATTRIBUTE)
    return None if noted is None else ConversionPlan.from_dict(noted)


def timm_model_args(plan: ConversionPlan) -> dict[str, Any]:
    """Return the arguments with which our entry point in timm rebuilds the plan's model."""
    return {**plan.model_args, "plan": plan.to_dict()}
