"""Carry out a plan on a model in place. Nothing is decided here, and nothing is half done."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .convs import CONV_CLASSES, PLAIN, find_form, why_not_replaceable
from .errors import PlanError
from .folding import fold_before_timm_fuses_, fold_to_dense_
from .interpolation import find_interpolation, position_limits
from .layers import DCLS_LAYERS, POSITION_STD, DclsConvNd
from .options import EXACT, INITS, POSITIONS, Init, Positions
from .plan_data import ConversionPlan, LayerPlan, TieGroup, check_plan
from .shared_parameters import spare_from_decay_
from .warmstart import largest_elements

TIMM_ARCHITECTURE = "dcls"  # the name under which timm rebuilds a converted model


def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
) -> None:
    """Replace every convolution of the plan by its DCLS layer, and register the tied positions on their owners.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`.
        init: "largest" keeps of every kernel the cells with the most energy over the tie group, at their places;
            "random" draws positions, and takes cells of the old kernels as weights, whose distribution thus stays that
            of the model's own initialisation. "auto" is "largest".
        positions: For "random": N(0, 0.5 cells) as in the paper, or uniform over the window.
        generator: Source of all randomness; seeded with 0 without it.

    A plan that says that it is folded leaves plain convolutions of the windows' sizes, as `fold_to_dense_` does.

    Raises:
        PlanError: The model is not the one that was planned for. It is then unchanged.
    """
    for name, value, allowed in [("init", init, INITS), ("positions", positions, POSITIONS)]:
        if value not in allowed:
            raise PlanError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    check_plan(plan)
    if init == EXACT:
        _check_exact(plan)
    convs = {layer.name: _find_conv(model, layer) for layer in plan.layers}
    for group in plan.tie_groups:
        _check_owner(model, group)
    generator = generator or torch.Generator().manual_seed(0)
    by_group: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        by_group.setdefault(layer.tie_group or f"\0{layer.name}", []).append(layer)
    with torch.no_grad():
        for members in by_group.values():
            _convert_group(model, plan, members, [convs[layer.name] for layer in members], init, positions, generator)
    if plan.folded:
        fold_to_dense_(model)
    else:
        fold_before_timm_fuses_(model)
        spare_from_decay_(model)
    _tell_timm(model, plan)


def _check_exact(plan: ConversionPlan) -> None:
    for layer in plan.layers:
        cells = layer.dense_weights // layer.lines
        if layer.kernel_count < cells or not find_interpolation(layer.interpolation).exact_on_cells:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that keeps them in their "
                f"cells, the plan has {layer.kernel_count}, {layer.interpolation}; plan with kernel_count='exact'"
            )


def _find_conv(model: nn.Module, layer: LayerPlan) -> _ConvNd:
    """The convolution of the plan, if it is that under all its names and can be replaced without loss."""
    try:
        conv, *others = [model.get_submodule(name) for name in layer.names]
    except AttributeError as error:
        raise PlanError(f"{layer.name}: the plan is for another model: {error}") from error
    if not isinstance(conv, CONV_CLASSES[len(layer.kernel_size)]) or not layer.name:
        raise PlanError(f"{layer.name}: is a {type(conv).__name__}, where the plan has a convolution")
    if any(other is not conv for other in others):
        raise PlanError(f"{layer.name}: the plan says that it also stands at {', '.join(layer.names[1:])}; it does not")
    if reason := why_not_replaceable(conv):
        raise PlanError(f"{layer.name}: {reason}")
    for name in ("in_channels", "out_channels", "groups", "kernel_size", "dilation"):
        if getattr(conv, name) != getattr(layer, name):
            raise PlanError(f"{layer.name}: {name} is {getattr(conv, name)}, the plan has {getattr(layer, name)}")
    if (conv.bias is not None) != layer.bias:
        raise PlanError(f"{layer.name}: has {'a' if conv.bias is not None else 'no'} bias, other than the plan says")
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


def _convert_group(
    model: nn.Module,
    plan: ConversionPlan,
    members: Sequence[LayerPlan],
    convs: Sequence[_ConvNd],
    init: Init,
    positions: Positions,
    generator: torch.Generator,
) -> None:
    first = members[0]
    kernels = [conv.weight.detach() for conv in convs]
    if init == "random":
        weights = [_cells_as_elements(kernel, first) for kernel in kernels]
        places = _random_positions(weights[0], first, positions, generator)
    else:
        weights, places = largest_elements(
            kernels,
            effective=[_effective(conv) for conv in convs],
            kernel_count=first.kernel_count,
            dilation=first.dilation,
            size=first.dilated_size,
            dense_axes=first.dense_axes,
        )
    layers = []
    for plan_of, conv, weight in zip(members, convs, weights, strict=True):
        layer = DCLS_LAYERS[len(first.dilated_size)].like(
            conv, plan_of.kernel_count, plan_of.dilated_size, plan_of.interpolation, plan_of.dense_axes
        )
        layer.weight.copy_(weight)
        layer.positions.copy_(places)
        layers.append(layer)
    if first.tie_group is not None:
        _tie(model, plan, first.tie_group, layers)
    for plan_of, layer in zip(members, layers, strict=True):
        for name in plan_of.names:
            model.set_submodule(name, layer)


def _effective(conv: _ConvNd) -> Tensor:
    """The kernel as it is convolved."""
    return (find_form(conv) or PLAIN).effective_weight(conv, conv.weight.detach())


def _tie(model: nn.Module, plan: ConversionPlan, group_name: str, layers: Sequence[DclsConvNd]) -> None:
    group = plan.group(group_name)
    owner = model.get_submodule(group.owner)
    for name, owner_name in group.parameters.items():
        shared: nn.Parameter = getattr(layers[0], name)
        shared.requires_grad = any(getattr(layer, name).requires_grad for layer in layers)
        owner.register_parameter(owner_name, shared)
    for layer in layers:
        layer.tie_(owner, group.parameters)


def _cells_as_elements(kernel: Tensor, layer: LayerPlan) -> Tensor:
    """(O, I, *kernel size) -> (O, I, *dense axes, E): the first cells of each line, from the start again if need be."""
    axes = [2 + axis for axis in range(len(layer.kernel_size)) if axis not in layer.dense_axes]
    dense = [2 + axis for axis in layer.dense_axes]
    cells = kernel.permute(0, 1, *dense, *axes).flatten(2 + len(dense))
    index = torch.arange(layer.kernel_count, device=kernel.device) % cells.shape[-1]
    return cells[..., index]


def _random_positions(weight: Tensor, layer: LayerPlan, positions: Positions, generator: torch.Generator) -> Tensor:
    """(A, *weight.shape), inside the window."""
    axes = [axis for axis in range(len(layer.dilated_size)) if axis not in layer.dense_axes]
    if weight.is_meta:
        return torch.empty(len(axes), *weight.shape, device="meta")
    drawn = torch.empty(len(axes), *weight.shape)  # float32 on the CPU, so that a seed means the same everywhere
    for index, axis in enumerate(axes):
        low, high = position_limits(layer.dilated_size[axis])
        if positions == "uniform":
            drawn[index].uniform_(low, high, generator=generator)
        else:
            drawn[index].normal_(0.0, POSITION_STD, generator=generator).clamp_(low, high)
    return drawn


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
    """The keyword arguments of the timm entry point `dcls` that rebuild the model of this plan."""
    return {**plan.model_args, "base": plan.model, "plan": plan.to_dict()}
