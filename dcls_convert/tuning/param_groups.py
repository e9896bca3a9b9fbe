"""Make parameter groups as timm does, with separate groups for positions and sigmas."""

import importlib
import math
import warnings
from collections.abc import Iterable
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor, nn

from ..errors import DclsConvertError, check_argument
from ..layers.position_parameters import (
    PositionParameter,
    describe_imprecise,
    position_parameters,
)
from ..networks.wrappers import inside_wrappers
from ..options import POSITION_LR_SCALE
from ..text import short_list

WEIGHT_DECAY = 0.05  # value of the paper's ConvNeXt recipe


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
    """Make timm's parameter groups, with separate groups for positions and sigmas.

    Positions have `position_lr_scale` times the learning rate of the weights, and no weight decay.

    With `lr`, each group has its own learning rate, and schedulers that multiply rates keep their
    ratio. For schedulers and optimizers that set one rate for all groups, such as OneCycleLR and
    Prodigy, docs/training.md says what to write instead.

    Without `lr`, the groups have timm's `lr_scale`, which only timm's schedulers apply. So
    `param_groups` itself can be the `param_group_fn` of `timm.optim.create_optimizer_v2`. timm then
    ignores its own `weight_decay` and `layer_decay`; bind them with `functools.partial`.

    Args:
        model: May be wrapped (DDP, `torch.compile`, EMA), and may have no DCLS layers. Frozen
            parameters are left out.
        lr: Learning rate of all parameters except positions and sigmas.
        weight_decay: Weight decay of the weights. Biases, norms and the parameters that
            `model.no_weight_decay()` names have none.
        position_lr_scale: The default of 5 is the paper's.
        sigma_lr_scale: By default `position_lr_scale`, because sigmas are lengths in cells, too.
        layer_decay: Factor of the learning rate from layer to layer towards the input, as in timm.
            It also applies to positions; tied ones have the rate of their first layer.
        timm_options: Passed to timm's `param_groups_weight_decay` or `param_groups_layer_decay`.

    Raises:
        DclsConvertError: A rate, scale or decay is negative or not finite, or FSDP1 has flattened
            the parameters.
    """
    check_argument("model", model, nn.Module)
    if sigma_lr_scale is None:
        sigma_lr_scale = position_lr_scale
    _check_rates(
        lr=lr,
        weight_decay=weight_decay,
        layer_decay=layer_decay,
        position_lr_scale=position_lr_scale,
        sigma_lr_scale=sigma_lr_scale,
    )
    model = inside_wrappers(model)
    _warn_if_partly_frozen(position_parameters(model, "positions"))
    imprecise = describe_imprecise(position_parameters(model))
    if imprecise is not None:
        warnings.warn(imprecise, stacklevel=2)
    scale_of: dict[int, float] = {}  # id of a positions or sigma parameter -> its own lr_scale
    for attribute, scale in (("positions", position_lr_scale), ("sigma", sigma_lr_scale)):
        for parameter in position_parameters(model, attribute):
            scale_of[id(parameter.tensor)] = scale
    optim: Any = importlib.import_module("timm.optim")
    make_groups = optim.param_groups_weight_decay
    if layer_decay is not None:
        make_groups = partial(optim.param_groups_layer_decay, layer_decay=layer_decay)
    without_decay = {
        *getattr(model, "no_weight_decay", tuple)(),
        *timm_options.pop("no_weight_decay_list", ()),
    }
    timm_groups = make_groups(
        model, weight_decay=weight_decay, no_weight_decay_list=without_decay, **timm_options
    )
    groups = _split_off_positions(timm_groups, scale_of)
    if lr is not None:
        for group in groups:
            rate = lr * group.pop("lr_scale", 1.0)
            group["lr"] = rate if isinstance(rate, Tensor) else float(rate)  # not NumPy's
    return groups


def _warn_if_partly_frozen(parameters: Iterable[PositionParameter]) -> None:
    """Warn once about positions that frozen and trained layers share."""
    problems = []
    for parameter in parameters:
        frozen = []
        trained = []
        for name, layer in parameter.layers.items():
            if layer.weight.requires_grad:
                trained.append(name)
            else:
                frozen.append(name)
        if frozen and trained and parameter.tensor.requires_grad:
            problems.append(f"{parameter.name} changes kernels of frozen {short_list(frozen, 2)}")
        elif frozen and trained:
            problems.append(f"{parameter.name} is frozen under trained {short_list(trained, 2)}")
    if problems:
        warnings.warn(
            f"frozen and trained layers share positions: {'; '.join(problems)}. Freeze before "
            "convert_, which does not tie frozen layers to others, or convert with tie='none'",
            stacklevel=3,
        )


def _split_off_positions(
    timm_groups: list[dict[str, Any]], scale_of: dict[int, float]
) -> list[dict[str, Any]]:
    """Move positions and sigmas into separate groups, one for each scale of the learning rate.

    `scale_of` maps the id of each of these parameters to its own scale, which is multiplied by the
    scale of its group.
    """
    groups: list[dict[str, Any]] = []
    moved: dict[float, list[nn.Parameter]] = {}  # lr_scale -> positions and sigmas
    for group in timm_groups:
        others = []
        for parameter in group["params"]:
            if id(parameter) in scale_of:
                scale = group.get("lr_scale", 1.0) * scale_of[id(parameter)]
                moved.setdefault(scale, []).append(parameter)
            else:
                others.append(parameter)
        if others:
            groups.append({**group, "params": others})
    for scale, parameters in moved.items():
        groups.append(
            # `use_fallback`: timm's Muon, which is made for matrices, leaves the group to AdamW.
            {"params": parameters, "weight_decay": 0.0, "lr_scale": scale, "use_fallback": True}
        )
    return groups


def _check_rates(**rates: float | Tensor | None) -> None:
    for name, value in rates.items():
        is_rate = isinstance(value, Real | Tensor) and math.isfinite(value) and value >= 0
        if value is not None and not is_rate:
            raise DclsConvertError(f"{name}={value!r} must be a finite number of at least 0")
