"""Put DCLS layers into a model: structure alone. Where values come from is decided elsewhere."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..fitting.groups import LayerGroup, make_layers
from ..networks.positions import spare_from_decay_
from ..networks.source import TIMM_ARCHITECTURE
from ..planning.plan import ConversionPlan
from .fold import fold_before_timm_fuses_


def place_layers_(model: nn.Module, plan: ConversionPlan) -> None:
    """Replace every convolution of the plan by its DCLS layer, or if it is folded by a plain one,
    without values.
    """
    put_layers_(model, plan, make_layers(model, plan), with_values=False)


def put_layers_(
    model: nn.Module,
    plan: ConversionPlan,
    groups: Sequence[LayerGroup],
    *,
    with_values: bool = True,
) -> None:
    """Put layers, or their plain convolutions if the plan is folded, into the model; register what
    they share.
    """
    for group in groups:
        if group.tie is not None and not plan.folded:
            owner = model.get_submodule(group.tie.owner)
            for name, owner_name in group.tie.parameters.items():
                owner.register_parameter(owner_name, getattr(group.layers[0], name))
            for layer in group.layers:
                layer.tie_(owner, group.tie.parameters)
        for layer_plan, layer in zip(group.plans, group.layers, strict=True):
            module: nn.Module = layer
            if plan.folded:
                size = (*layer.weight.shape[:2], *layer.kernel_size)
                module = layer.fuse(None if with_values else layer.weight.new_empty(size))
            for name in layer_plan.names:
                model.set_submodule(name, module)
    if not plan.folded:
        fold_before_timm_fuses_(model)
        spare_from_decay_(model)
    config = getattr(model, "pretrained_cfg", None)
    if (
        isinstance(config, dict) and plan.model is not None
    ):  # timm's own savers then write a config that rebuilds it
        note_for_timm(model, {**config, "architecture": TIMM_ARCHITECTURE})
        vars(model)["_model_args"] = timm_model_args(plan)


def note_for_timm(model: nn.Module, config: dict[str, Any]) -> None:
    """Set the preprocessing config of a model, under both names that timm reads."""
    vars(model).update(pretrained_cfg=config, default_cfg=config)


def timm_model_args(plan: ConversionPlan) -> dict[str, Any]:
    """The keyword arguments with which our entry point in timm's registry rebuilds the model of
    this plan.
    """
    return {**plan.model_args, "plan": plan.to_dict()}
