"""Parameter groups: as timm makes them, with groups of their own for positions and sigmas."""

import importlib
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..networks.positions import position_parameters
from ..options import POSITION_LR_SCALE
from .wrappers import unwrapped

WEIGHT_DECAY = 0.05  # of the paper's ConvNeXt recipe


def param_groups(
    model: nn.Module,
    lr: float | Tensor | None = None,
    weight_decay: float = WEIGHT_DECAY,
    position_lr_scale: float = POSITION_LR_SCALE,
    *,
    sigma_lr_scale: float | None = None,
    layer_decay: float | None = None,
    **timm_options: Any,
) -> list[dict[str, Any]]:
    """Make parameter groups: timm's, with groups of their own for positions and sigmas.

    Positions learn `position_lr_scale` times as fast as the rest, and do not decay.

    With `lr`, each group has its own learning rate. This works in any optimizer, with the
    schedulers of torch, with timm's, or with none. (Rates that a scheduler itself states, such as
    timm's `lr_min` and `warmup_lr_init`, are then the same for all groups.)

    Without `lr`, the groups have timm's `lr_scale` instead. Only timm's schedulers apply it, at
    each step and to the whole schedule, as the paper's authors did. (A group never has both, since
    these schedulers would then scale its rate twice.) So `param_groups` itself can be the
    `param_group_fn` of `timm.optim.create_optimizer_v2`. timm then ignores its own `weight_decay`
    and `layer_decay`; bind them here with `functools.partial`.

    Positions and sigmas also have `use_fallback`: timm's Muon optimizes matrices, and leaves
    parameters with this mark to AdamW.

    Args:
        model: May be wrapped (DDP, `torch.compile`, EMA), and may have no DCLS layers. Frozen
            parameters are left out.
        lr: Learning rate of everything but positions and sigmas.
        weight_decay: Weight decay of the weights. Biases, norms and the parameters that
            `model.no_weight_decay()` names have none.
        position_lr_scale: The paper's 5 by default.
        sigma_lr_scale: None: as for positions, since sigmas are lengths in cells as well.
        layer_decay: Factor of the learning rate from layer to layer towards the input, as in timm;
            positions get it times `position_lr_scale`. A tied parameter has the rate of the first
            of its layers, the slowest.
        timm_options: For `timm.optim.param_groups_weight_decay`, or with `layer_decay`,
            `param_groups_layer_decay`.

    Raises:
        DclsConvertError: A rate, scale or decay that is negative or not finite.
    """
    if sigma_lr_scale is None:
        sigma_lr_scale = position_lr_scale
    _check_rates(
        lr=lr,
        weight_decay=weight_decay,
        layer_decay=layer_decay,
        position_lr_scale=position_lr_scale,
        sigma_lr_scale=sigma_lr_scale,
    )
    if layer_decay is not None:
        timm_options["layer_decay"] = layer_decay
    model = unwrapped(model)
    scale_of_kind = {"positions": position_lr_scale, "sigma": sigma_lr_scale}
    scale_of: dict[int, float] = {}  # id of a positions or sigma parameter -> its own lr_scale
    for found in position_parameters(model):
        scale_of[id(found.tensor)] = scale_of_kind[found.kind]

    timm_groups = _groups_of_timm(model, weight_decay=weight_decay, **timm_options)
    groups = _split_off_positions(timm_groups, scale_of)
    if lr is not None:
        for group in groups:
            group["lr"] = lr * group.pop("lr_scale", 1.0)
    return groups


def _split_off_positions(
    timm_groups: list[dict[str, Any]], scale_of: dict[int, float]
) -> list[dict[str, Any]]:
    """Move some parameters into groups of their own, one for each scale of the learning rate.

    Args:
        timm_groups: All parameters.
        scale_of: The ids of the parameters to move, and their scales; a parameter also keeps the
            scale of the group that it comes from.
    """
    groups: list[dict[str, Any]] = []
    by_scale: dict[float, list[nn.Parameter]] = {}  # lr_scale -> positions and sigmas
    for group in timm_groups:
        others = []
        for parameter in group["params"]:
            if id(parameter) in scale_of:
                scale = group.get("lr_scale", 1.0) * scale_of[id(parameter)]
                by_scale.setdefault(scale, []).append(parameter)
            else:
                others.append(parameter)
        if others:
            groups.append({**group, "params": others})
    for scale, parameters in by_scale.items():
        groups.append(
            {"params": parameters, "weight_decay": 0.0, "lr_scale": scale, "use_fallback": True}
        )
    return groups


def _check_rates(**rates: float | Tensor | None) -> None:
    for name, value in rates.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DclsConvertError(f"{name}={value!r} must be a finite number of at least 0")


def _groups_of_timm(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The groups that timm makes; with `lr_scale` if the options have `layer_decay`."""
    # timm reads a parameter's depth from its name. A tied parameter is registered on its stage,
    # which timm takes for a part of the head. Give it the name that it has in its first layer.
    layer_names = {}
    for found in position_parameters(model):
        first_layer = next(iter(found.layers))
        layer_names[found.name] = f"{first_layer}.{found.kind}".lstrip(".")
    named = []
    for name, parameter in model.named_parameters():
        named.append((layer_names.get(name, name), parameter))
    # Stands in for the model: it has what timm's functions read of one, with these names.
    renamed_model = SimpleNamespace(
        named_parameters=lambda: named,
        pretrained_cfg=getattr(model, "pretrained_cfg", None) or {},
    )
    if hasattr(model, "group_matcher"):
        renamed_model.group_matcher = model.group_matcher
    without_decay: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    options["no_weight_decay_list"] = {*without_decay, *options.get("no_weight_decay_list", ())}
    optim: Any = importlib.import_module("timm.optim")
    make_groups = optim.param_groups_weight_decay
    if "layer_decay" in options:
        make_groups = optim.param_groups_layer_decay
    groups: list[dict[str, Any]] = make_groups(renamed_model, **options)
    return groups
