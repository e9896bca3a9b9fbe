"""Put DCLS layers into a model. This is structure alone; values are found elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..layers.dcls_conv import DclsConvNd
from ..networks.position_parameters import exclude_from_weight_decay_
from ..networks.pretrained_cfg import set_pretrained_cfg_
from ..networks.source import TIMM_ARCHITECTURE
from ..planning.plan import ConversionPlan
from .branches import guard_merging_
from .groups import LayerGroup, make_layers


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
    - guards of the methods that merge branches (`branches.py`);
    - names that `no_weight_decay` returns (`networks/position_parameters.py`);
    - if timm's or torchvision's: `_model_args`, and the architecture in `pretrained_cfg`.

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
    guard_merging_(model, plan)
    if not plan.folded:
        exclude_from_weight_decay_(model)
    # With this, timm's own savers write a config that rebuilds the converted model.
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and plan.model is not None:
        set_pretrained_cfg_(model, {**config, "architecture": TIMM_ARCHITECTURE})
        vars(model)["_model_args"] = timm_model_args(plan)


def timm_model_args(plan: ConversionPlan) -> dict[str, Any]:
    """Return the arguments with which our entry point in timm rebuilds the plan's model."""
    return {**plan.model_args, "plan": plan.to_dict()}
