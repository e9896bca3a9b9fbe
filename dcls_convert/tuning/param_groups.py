"""Parameter groups, clamping and the repulsive loss of a model."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..layers.positions import shared_parameters, unwrapped, whole
from .repulsion import repulsion
from .timm_groups import timm_param_groups

POSITION_LR_SCALE = 5.0  # paper, section 3 "Positions learning rate scaling"
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
    """Parameter groups: positions learn `position_lr_scale` times as fast and do not decay, the rest is as timm has it.

    With `lr`, each group states its own learning rate: right in any optimizer, with the schedulers of torch, with
    timm's, or with none. (A rate that a scheduler states for itself, such as timm's `lr_min` and `warmup_lr_init`, is
    then the same for all groups.) Without `lr`, the groups state timm's `lr_scale` instead, which timm's schedulers
    alone apply, at each step to the whole schedule; that is what the paper's authors did. So `param_groups` itself
    can be handed to timm:

        optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=4e-3, param_group_fn=tuning.param_groups)
        scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer)

    timm then ignores its own `weight_decay` and `layer_decay`: bind them here with `functools.partial`.

    Never both in one group: timm's schedulers would multiply a scaled rate once more.

    Args:
        model: May be wrapped (DDP, `torch.compile`, EMA), and may have no DCLS layers. Frozen parameters are left out.
        lr: Learning rate of everything but positions and sigmas.
        weight_decay: Of the weights; biases, norms and what `model.no_weight_decay()` names have none.
        position_lr_scale: The paper's 5 by default.
        sigma_lr_scale: As for positions without it; sigmas are lengths in cells as well.
        layer_decay: Factor of the learning rate from layer to layer towards the input, as in timm; positions get it
            times `position_lr_scale`. What is tied over several layers counts to the first of them, the slowest.
        timm_options: For `timm.optim.param_groups_weight_decay`, or with `layer_decay`, `param_groups_layer_decay`.

    Positions and sigmas also carry `use_fallback`, by which timm's Muon leaves them to AdamW: they are no matrices.

    Raises:
        DclsConvertError: A rate, scale or decay that is negative or not finite.
    """
    sigma_lr_scale = position_lr_scale if sigma_lr_scale is None else sigma_lr_scale
    _check_rates(lr=lr, weight_decay=weight_decay, layer_decay=layer_decay)
    _check_rates(position_lr_scale=position_lr_scale, sigma_lr_scale=sigma_lr_scale)
    model = unwrapped(model)
    shared = shared_parameters(model)
    scale_of = {"positions": position_lr_scale, "sigma": sigma_lr_scale}
    scales = {id(one.tensor): scale_of[one.kind] for one in shared}
    names = {one.name: one.name_below_layer for one in shared}
    groups: list[dict[str, Any]] = []
    moving: dict[float, list[nn.Parameter]] = {}  # lr_scale -> positions and sigmas
    for group in timm_param_groups(model, names, layer_decay, weight_decay=weight_decay, **timm_options):
        if rest := [parameter for parameter in group["params"] if id(parameter) not in scales]:
            groups.append({**group, "params": rest})
        for parameter in group["params"]:
            if id(parameter) in scales:
                scale = group.get("lr_scale", 1.0) * scales[id(parameter)]
                moving.setdefault(scale, []).append(parameter)
    for scale, parameters in moving.items():
        groups.append({"params": parameters, "weight_decay": 0.0, "lr_scale": scale, "use_fallback": True})
    return groups if lr is None else [_with_lr(group, lr) for group in groups]


def clamp_positions_(model: nn.Module) -> None:
    """Bring all positions back into their windows, and sigmas above their least.

    The layers do so themselves whenever they are used in training, and when they are saved. This is for loops that do
    it after every step, as the paper does, so that positions are inside at any time; and for FSDP2, under which the
    layers see gathered copies of their parameters in training.
    """
    seen = set()
    for shared in shared_parameters(model):
        for layer in shared.layers:
            # Layers tied by hand may have different windows.
            key = (id(layer.positions), layer.dilated_kernel_size, layer.interpolation)
            if key not in seen:
                seen.add(key)
                layer.clamp_positions_()


def repulsive_loss(model: nn.Module) -> Tensor:
    """How far the elements of a kernel overlap, from 0 to 1; its *square* is what the paper's authors add to the loss:

        loss = criterion(model(images), labels) + tuning.repulsive_loss(model) ** 2

    They do so from epoch 21 on. For each positions tensor, 2 / (m (m - 1) kernels) * sum over kernels and pairs i < j
    of relu(1 - |p_i - p_j|), with m elements in a kernel and distances in cells; then the mean over all positions
    tensors, tied ones once. Kernels are out_channels * in_channels / groups, times the cells of dense axes.

    Memory stays bounded, in backward too: no tensor is larger than the positions or a few MiB. Elements at exactly
    one place do not push each other, since no direction is given.

    Returns:
        A scalar on the first positions' device; 0, without a gradient, where the model has no DCLS layers. Under FSDP2
        all ranks must call it.

    Source: paper, section 3 "Repulsive loss"; the authors' ConvNeXt training code.
    """
    positions = [shared.tensor for shared in shared_parameters(model) if shared.kind == "positions"]
    if not positions:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    losses = [repulsion(whole(tensor)) for tensor in positions]
    return torch.stack([loss.to(losses[0]) for loss in losses]).mean()


def _with_lr(group: dict[str, Any], lr: float | Tensor) -> dict[str, Any]:
    scale = group.get("lr_scale", 1.0)
    return {**{key: value for key, value in group.items() if key != "lr_scale"}, "lr": lr * scale}


def _check_rates(**rates: float | Tensor | None) -> None:
    for name, value in rates.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise DclsConvertError(f"{name}={value!r} must be a finite number of at least 0")
