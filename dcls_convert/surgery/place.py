"""Carry out a plan on a model in place. Nothing is decided here, and nothing is half done."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import PlanError
from ..fitting.warm_start import fit_elements
from ..layers.conv_classes import CONV_CLASSES, PLAIN, find_form, why_not_replaceable
from ..layers.dcls_conv import DCLS_LAYERS, POSITION_STD, DclsConvNd
from ..layers.elements import largest_elements
from ..layers.geometry import grid_positions
from ..layers.interpolation import find_interpolation, position_limits
from ..layers.positions import spare_from_decay_
from ..options import EXACT, INITS, POSITIONS, Init, Positions
from ..planning.plan import ConversionPlan, LayerPlan, TieGroup, check_plan
from .fold import fold_before_timm_fuses_, fold_to_dense_

TIMM_ARCHITECTURE = "dcls_convert"  # our entry in timm's registry, which rebuilds a converted model


def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
    calibration: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Replace every convolution of the plan by its DCLS layer, and register the tied positions on their owners.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`.
        init: "fit" (also "auto") finds elements whose kernels have the least squared distance to the old ones;
            "largest" keeps of every kernel the cells with the most energy over the tie group, at their places, and
            "exact" is that for a plan with an element for every cell (`plan_conversion(kernel_count="exact")`), whose
            outputs then are those of the old model; "random" draws positions, and takes cells of the old kernels as
            weights, whose distribution thus stays that of the model's own initialisation.
        positions: For "random": N(0, 0.5 cells) as in the paper, or uniform over the window.
        generator: Source of all randomness; seeded with 0 without it.
        calibration: For "fit": from `calibrate`, what an error of a kernel does to the outputs, by the layer's name.

    A plan that says that it is folded leaves plain convolutions of the windows' sizes, as `fold_to_dense_` does.

    Returns:
        For every layer by name the relative error of its constructed kernel, |new - old| / |old|; nothing for "random"
        and on the meta device.

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
    errors: dict[str, float] = {}
    with torch.no_grad():
        for members in by_group.values():
            old = [convs[layer.name] for layer in members]
            if init == "random":
                elements = _random_elements(members[0], old, positions, generator)
            else:
                elements = _elements_of_old_kernels(members, old, init, generator, calibration)
            layers = _layers(members, old, *elements)
            if init != "random":
                errors |= _kernel_errors(members, old, layers)
            _replace(model, plan, members, layers)
    if plan.folded:
        fold_to_dense_(model)
    else:
        fold_before_timm_fuses_(model)
        spare_from_decay_(model)
    _tell_timm(model, plan)
    return errors


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


Elements = tuple[Sequence[Tensor], Tensor]  # weights of each layer (O, I, *D, E), their positions (A, O, I, *D, E)


def _random_elements(
    layer: LayerPlan, convs: Sequence[_ConvNd], positions: Positions, generator: torch.Generator
) -> Elements:
    weights = [_cells_as_elements(conv.weight.detach(), layer) for conv in convs]
    return weights, _random_positions(weights[0], layer, positions, generator)


def _elements_of_old_kernels(
    members: Sequence[LayerPlan],
    convs: Sequence[_ConvNd],
    init: Init,
    generator: torch.Generator,
    calibration: Mapping[str, Tensor] | None,
) -> Elements:
    first = members[0]
    kernels = [conv.weight.detach() for conv in convs]
    effective = [_effective(conv) for conv in convs]
    shape: dict[str, Any] = {
        "kernel_count": first.kernel_count,
        "dilation": first.dilation,
        "size": first.dilated_size,
        "dense_axes": first.dense_axes,
    }
    largest = largest_elements(kernels, effective=effective, **shape)
    if init in ("largest", EXACT):
        return largest
    roots = None if calibration is None else [calibration[layer.name] for layer in members]
    fitted = fit_elements(
        effective,
        interpolation=first.interpolation,
        roots=roots,
        seed=int(torch.randint(2**62, (), generator=generator)),
        **shape,
    )
    if all(kernel is conv.weight for kernel, conv in zip(effective, convs, strict=True)) or effective[0].is_meta:
        return fitted
    # What transforms the elements (weight standardisation) can undo the fit of what they should become.
    errors = [_kernel_errors(members, convs, _layers(members, convs, *elements)) for elements in (fitted, largest)]
    return fitted if all(errors[0][layer.name] <= errors[1][layer.name] for layer in members) else largest


def _layers(
    members: Sequence[LayerPlan], convs: Sequence[_ConvNd], weights: Sequence[Tensor], positions: Tensor
) -> list[DclsConvNd]:
    layers = []
    for plan_of, conv, weight in zip(members, convs, weights, strict=True):
        layer = DCLS_LAYERS[len(plan_of.dilated_size)].like(
            conv, plan_of.kernel_count, plan_of.dilated_size, plan_of.interpolation, plan_of.dense_axes
        )
        layer.weight.copy_(weight)
        layer.positions.copy_(positions)
        layers.append(layer)
    return layers


def _kernel_errors(
    members: Sequence[LayerPlan], convs: Sequence[_ConvNd], layers: Sequence[DclsConvNd]
) -> dict[str, float]:
    """|new - old| / |old| for the kernels of each layer, as they are convolved."""
    errors: dict[str, float] = {}
    for member, conv, layer in zip(members, convs, layers, strict=True):
        old = _effective(conv)
        if old.is_meta:
            return {}
        left = layer.kernel().to(torch.promote_types(old.dtype, torch.float32))
        shapes = zip(member.kernel_size, member.dilation, member.dilated_size, strict=True)
        places = [[cell + size // 2 for cell in grid_positions(side, step, size)] for side, step, size in shapes]
        grid = torch.meshgrid([torch.tensor(axis) for axis in places], indexing="ij")
        everywhere: tuple[Any, ...] = (slice(None), slice(None), *grid)
        left[everywhere] -= old
        norm = float(old.float().norm())
        errors[member.name] = float(left.norm()) / norm if norm else 0.0
    return errors


def _replace(
    model: nn.Module, plan: ConversionPlan, members: Sequence[LayerPlan], layers: Sequence[DclsConvNd]
) -> None:
    if members[0].tie_group is not None:
        _tie(model, plan, members[0].tie_group, layers)
    for member, layer in zip(members, layers, strict=True):
        for name in member.names:
            model.set_submodule(name, layer)


def _effective(conv: _ConvNd) -> Tensor:
    """The kernel as it is convolved; the very weight where nothing is done to it."""
    return (find_form(conv) or PLAIN).effective_weight(conv, conv.weight)


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
    return cells.index_select(-1, index)  # sooner than cells[..., index]


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
