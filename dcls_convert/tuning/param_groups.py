"""Parameter groups: as timm makes them, with groups of their own for positions and sigmas."""

import importlib
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..networks.positions import position_parameters, unwrapped
from ..options import POSITION_LR_SCALE

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
    """Parameter groups: positions learn `position_lr_scale` times as fast and do not decay; the
    rest is timm's.

    With `lr`, each group has its own learning rate. This works in any optimizer, with the
    schedulers of torch, with timm's, or with none. (Rates that a scheduler itself states, such as
    timm's `lr_min` and `warmup_lr_init`, are then the same for all groups.) Without `lr`, the
    groups have timm's `lr_scale` instead. Only timm's schedulers apply it, at each step and to the
    whole schedule, as the paper's authors did. So `param_groups` itself can be the `param_group_fn`
    of `timm.optim.create_optimizer_v2`; timm then ignores its own `weight_decay` and `layer_decay`:
    bind them here with `functools.partial`. (With both `lr` and `lr_scale`, they would scale a rate
    twice.)

    Positions and sigmas also carry `use_fallback`, by which timm's Muon leaves them to AdamW: they
    are no matrices.

    Args:
        model: May be wrapped (DDP, `torch.compile`, EMA), and may have no DCLS layers. Frozen
            parameters are left out.
        lr: Learning rate of everything but positions and sigmas.
        weight_decay: Of the weights; none for biases, norms and the parameters that
            `model.no_weight_decay()` names.
        position_lr_scale: The paper's 5 by default.
        sigma_lr_scale: As for positions without it; sigmas are lengths in cells as well.
        layer_decay: Factor of the learning rate from layer to layer towards the input, as in timm;
            positions get it times `position_lr_scale`. A tied parameter has the rate of the first
            of its layers, the slowest.
        timm_options: For `timm.optim.param_groups_weight_decay`, or with `layer_decay`,
            `param_groups_layer_decay`.

    Raises:
        DclsConvertError: A rate, scale or decay that is negative or not finite.
    """
    kinds = {
        "positions": position_lr_scale,
        "sigma": position_lr_scale if sigma_lr_scale is None else sigma_lr_scale,
    }
    rates = {"lr": lr, "weight_decay": weight_decay, "layer_decay": layer_decay}
    rates |= {f"{kind.removesuffix('s')}_lr_scale": scale for kind, scale in kinds.items()}
    for name, value in rates.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DclsConvertError(f"{name}={value!r} must be a finite number of at least 0")
    if layer_decay is not None:
        timm_options["layer_decay"] = layer_decay
    model = unwrapped(model)
    scales = {id(one.tensor): kinds[one.kind] for one in position_parameters(model)}
    groups: list[dict[str, Any]] = []
    moving: dict[float, list[nn.Parameter]] = {}  # lr_scale -> positions and sigmas
    for group in _groups_of_timm(model, weight_decay=weight_decay, **timm_options):
        if rest := [parameter for parameter in group["params"] if id(parameter) not in scales]:
            groups.append({**group, "params": rest})
        for parameter in group["params"]:
            if id(parameter) in scales:
                scale = group.get("lr_scale", 1.0) * scales[id(parameter)]
                moving.setdefault(scale, []).append(parameter)
    for scale, tensors in moving.items():
        groups.append(
            {"params": tensors, "weight_decay": 0.0, "lr_scale": scale, "use_fallback": True}
        )
    if lr is not None:
        for group in groups:
            group["lr"] = lr * group.pop("lr_scale", 1.0)
    return groups


def _groups_of_timm(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """timm's own groups, with `lr_scale` where it is asked for `layer_decay`."""
    # timm reads the depth from a name, and takes a parameter of a stage that is in no block for a
    # part of the head.
    names = {
        one.name: f"{next(iter(one.layers))}.{one.kind}".lstrip(".")
        for one in position_parameters(model)
    }
    named = [(names.get(name, name), parameter) for name, parameter in model.named_parameters()]
    # What timm's functions read of a model, with these names.
    seen = SimpleNamespace(
        named_parameters=lambda: named, pretrained_cfg=getattr(model, "pretrained_cfg", None) or {}
    )
    if hasattr(model, "group_matcher"):
        seen.group_matcher = model.group_matcher
    own: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    options["no_weight_decay_list"] = {*own, *options.get("no_weight_decay_list", ())}
    optim: Any = importlib.import_module("timm.optim")
    make = (
        optim.param_groups_layer_decay
        if "layer_decay" in options
        else optim.param_groups_weight_decay
    )
    groups: list[dict[str, Any]] = make(seen, **options)
    return groups
