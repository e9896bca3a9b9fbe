"""Put DCLS layers into a model: structure alone. Where values come from is decided elsewhere."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..fitting.groups import LayerGroup, make_layers
from ..layers.conv_classes import Conv
from ..layers.dcls_conv import DclsConvNd
from ..networks.positions import spare_from_decay_
from ..planning.plan import ConversionPlan
from .fold import fold_before_timm_fuses_

TIMM_ARCHITECTURE = "dcls_convert"  # our entry in timm's registry, which rebuilds a converted model


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
    put_layers_(model, plan, make_layers(model, plan), with_values=False)


def put_layers_(
    model: nn.Module, plan: ConversionPlan, groups: Sequence[LayerGroup], *, with_values: bool = True
) -> None:
    """Put layers, or their plain convolutions if the plan is folded, into the model; register what they share."""
    for group in groups:
        if group.tie is not None and not plan.folded:
            owner = model.get_submodule(group.tie.owner)
            for name, owner_name in group.tie.parameters.items():
                owner.register_parameter(owner_name, getattr(group.layers[0], name))
            for layer in group.layers:
                layer.tie_(owner, group.tie.parameters)
        for layer_plan, layer in zip(group.plans, group.layers, strict=True):
            module = layer if not plan.folded else layer.fuse() if with_values else _folded(layer)
            for name in layer_plan.names:
                model.set_submodule(name, module)
    if not plan.folded:
        fold_before_timm_fuses_(model)
        spare_from_decay_(model)
    _tell_timm(model, plan)


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
