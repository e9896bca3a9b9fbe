"""Put DCLS layers into a model: structure alone. Where values come from is decided elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..layers.conv_classes import CONV_CLASSES, Conv, why_not_replaceable
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..networks.positions import spare_from_decay_
from ..networks.running import unchanged_on_failure
from ..planning.plan import ConversionPlan, LayerPlan, TieGroup
from .fold import fold_before_timm_fuses_

TIMM_ARCHITECTURE = "dcls_convert"  # our entry in timm's registry, which rebuilds a converted model


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerGroup:
    """New layers that share their positions (or one that is alone), and the convolutions that they will replace."""

    plans: tuple[LayerPlan, ...]
    convs: tuple[Conv, ...]
    layers: tuple[DclsConvNd, ...]  # the same `positions` and `sigma` objects in all of them
    tie: TieGroup | None  # where the shared parameters will be registered; None for a layer alone


def place_layers_(model: nn.Module, plan: ConversionPlan) -> None:
    """Replace every convolution of the plan by its DCLS layer, whose elements have no values yet.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device, and stays on its
            device. Biases and other parameters of the convolutions keep their values.
        plan: From `plan_conversion`. If it says that the model is folded, plain convolutions of the windows' sizes are
            placed.

    Raises:
        PlanError: The model is not the one that was planned for. It is then unchanged.
    """
    put_layers_(model, plan, make_layers(model, plan), hollow=True)


def make_layers(model: nn.Module, plan: ConversionPlan) -> tuple[LayerGroup, ...]:
    """All layers of the plan, without values and not in the model yet. PlanError: as `place_layers_`."""
    convs = {layer.name: _find_conv(model, layer) for layer in plan.layers}
    for group in plan.tie_groups:
        _check_owner(model, group)
    members: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        members.setdefault(layer.tie_group or f"\0{layer.name}", []).append(layer)
    return tuple(_group(plans, [convs[layer.name] for layer in plans], plan) for plans in members.values())


def put_layers_(model: nn.Module, plan: ConversionPlan, groups: Sequence[LayerGroup], *, hollow: bool = False) -> None:
    """Put layers, or their plain convolutions if the plan is folded, into the model; register what they share.

    Plain convolutions of `hollow` layers have no values either. All layers are put, or none.
    """
    with unchanged_on_failure(model):
        for group in groups:
            if group.tie is not None and not plan.folded:
                owner = model.get_submodule(group.tie.owner)
                for name, owner_name in group.tie.parameters.items():
                    owner.register_parameter(owner_name, getattr(group.layers[0], name))
                for layer in group.layers:
                    layer.tie_(owner, group.tie.parameters)
            for layer_plan, layer in zip(group.plans, group.layers, strict=True):
                module = layer if not plan.folded else _folded(layer) if hollow else layer.fuse()
                for name in layer_plan.names:
                    model.set_submodule(name, module)
        if not plan.folded:
            fold_before_timm_fuses_(model)
            spare_from_decay_(model)
        _tell_timm(model, plan)


def _find_conv(model: nn.Module, layer: LayerPlan) -> Conv:
    """The convolution of the plan, if it is found under all its names and can be replaced without loss."""
    try:
        conv, *others = [model.get_submodule(name) for name in layer.names]
    except AttributeError as error:
        raise PlanError(f"{layer.name}: the plan is for another model: {error}") from error
    if not isinstance(conv, CONV_CLASSES[len(layer.kernel_size)]) or not layer.name:
        raise PlanError(f"{layer.name}: is a {type(conv).__name__}, where the plan has a convolution")
    if any(other is not conv for other in others):
        raise PlanError(f"{layer.name}: the plan has it also at {', '.join(layer.names[1:])}; the model has not")
    if reason := why_not_replaceable(conv):
        raise PlanError(f"{layer.name}: {reason}")
    for name in ("in_channels", "out_channels", "groups", "kernel_size", "dilation"):
        if getattr(conv, name) != getattr(layer, name):
            raise PlanError(f"{layer.name}: {name} is {getattr(conv, name)}, the plan has {getattr(layer, name)}")
    if (conv.bias is not None) != layer.bias:
        raise PlanError(f"{layer.name}: has {'a' if conv.bias is not None else 'no'} bias, unlike the plan")
    return conv


def _check_owner(model: nn.Module, group: TieGroup) -> None:
    try:
        owner = model.get_submodule(group.owner)
        inside = [model.get_submodule(name) for name in group.layers]
    except AttributeError as error:
        raise PlanError(f"tie group {group.name}: the plan is for another model: {error}") from error
    if not set(inside) <= set(owner.modules()):
        raise PlanError(f"tie group {group.name}: {group.owner} does not hold all its layers")
    for parameter in group.parameters.values():
        if hasattr(owner, parameter):
            raise PlanError(f"{group.owner or 'the model'} already has a {parameter}; is the model converted?")
        if not parameter.isidentifier():
            raise PlanError(f"tie group {group.name}: {parameter!r} is no name for a parameter")


def _group(plans: Sequence[LayerPlan], convs: Sequence[Conv], plan: ConversionPlan) -> LayerGroup:
    layers = [
        DCLS_LAYERS[len(layer.dilated_size)].like(
            conv, layer.kernel_count, layer.dilated_size, layer.interpolation, layer.dense_axes
        )
        for layer, conv in zip(plans, convs, strict=True)
    ]
    first, *others = layers
    for name in plans[0].shared_parameters:
        shared = getattr(first, name)
        shared.requires_grad = any(getattr(layer, name).requires_grad for layer in layers)
        for other in others:
            setattr(other, name, shared)
    tie = None if plans[0].tie_group is None else plan.group(plans[0].tie_group)
    return LayerGroup(plans=tuple(plans), convs=tuple(convs), layers=tuple(layers), tie=tie)


def _folded(layer: DclsConvNd) -> Conv:
    """The plain convolution of the window's size, without values: nothing is constructed."""
    device = layer.weight.device
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if name != "bias":
            setattr(layer, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    conv = layer.fuse()
    conv.weight = nn.Parameter(torch.empty_like(conv.weight, device=device))
    return conv


def _tell_timm(model: nn.Module, plan: ConversionPlan) -> None:
    """Let timm's own savers (`save_for_hf`, `push_to_hf_hub`) write a config that rebuilds the converted model."""
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and plan.model is not None:
        note_for_timm(model, {**config, "architecture": TIMM_ARCHITECTURE})
        vars(model)["_model_args"] = timm_model_args(plan)


def note_for_timm(model: nn.Module, config: dict[str, Any]) -> None:
    """Set the preprocessing config of a model, under both names that timm reads."""
    vars(model).update(pretrained_cfg=config, default_cfg=config)


def timm_model_args(plan: ConversionPlan) -> dict[str, Any]:
    """The keyword arguments with which our entry point in timm's registry rebuilds the model of this plan."""
    return {**plan.model_args, "plan": plan.to_dict()}
