"""Values for layers that are made and not in the model yet, from the kernels of the convolutions that they replace.

Axes: O output channels, I input channels per group, D cells of the dense axes, E kernel elements, A learnt axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..fitting.warm_start import fit_elements
from ..layers.conv_classes import PLAIN, find_form
from ..layers.elements import Elements, first_cells, largest_elements, random_positions
from ..layers.geometry import grid_positions
from ..layers.interpolation import find_interpolation
from ..options import AUTO, EXACT, INITS, POSITIONS, Init, Positions
from ..planning.plan import ConversionPlan
from .place import LayerGroup, make_layers, put_layers_


@torch.no_grad()
def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
    calibration: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Replace every convolution of the plan by its DCLS layer, with values from the old kernels.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`. If it says that the model is folded, plain convolutions with the constructed
            kernels are placed.
        init: As in `convert_`. "exact" needs a plan with an element for every cell
            (`plan_conversion(kernel_count="exact")`). The weights of "random" elements are cells of the old kernels,
            so that they stay distributed as the model initialises them.
        positions: As in `convert_`.
        generator: Source of all randomness; seeded with 0 without it.
        calibration: For "fit": from `calibrate`, what an error of a kernel does to the outputs, by the layer's name.

    Returns:
        For every layer by name the relative error of its constructed kernel, |new - old| / |old|; nothing for "random"
        and on the meta device.

    Raises:
        PlanError: The model is not the one that was planned for, or the calibration lacks a layer. Whatever is raised,
            running out of memory included, the model is then unchanged.
    """
    for name, value, allowed in [("init", init, INITS), ("positions", positions, POSITIONS)]:
        if value not in allowed:
            raise PlanError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    if init == EXACT:
        _check_exact(plan)
    groups = make_layers(model, plan)
    generator = generator or torch.Generator().manual_seed(0)
    errors: dict[str, float] = {}
    for group in groups:
        if init == "random":
            _fill_(group, _random_elements(group, generator, uniform=positions == "uniform"))
        else:
            roots = None if calibration is None else _roots(group, calibration)
            errors |= _fill_from_kernels_(group, init, generator, roots)
    put_layers_(model, plan, groups)
    return errors


def _check_exact(plan: ConversionPlan) -> None:
    for layer in plan.layers:
        cells = layer.dense_weights // layer.lines
        if layer.kernel_count < cells or not find_interpolation(layer.interpolation).exact_on_cells:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that keeps them in their "
                f"cells, the plan has {layer.kernel_count}, {layer.interpolation}; plan with kernel_count='exact'"
            )


def _roots(group: LayerGroup, calibration: Mapping[str, Tensor]) -> list[Tensor]:
    for layer in group.plans:
        if layer.name not in calibration:
            raise PlanError(
                f"{layer.name}: the calibration has nothing for this layer; calibrate the same model with this plan"
            )
    return [calibration[layer.name] for layer in group.plans]


def _fill_(group: LayerGroup, elements: Elements) -> None:
    weights, positions = elements
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)
    group.layers[0].positions.copy_(positions)  # which all layers of the group share


def _random_elements(group: LayerGroup, generator: torch.Generator, *, uniform: bool) -> Elements:
    first = group.plans[0]
    weights = [first_cells(conv.weight.detach(), first.kernel_count, first.dense_axes) for conv in group.convs]
    return weights, random_positions(weights[0], first.dilated_size, first.dense_axes, generator, uniform=uniform)


def _fill_from_kernels_(
    group: LayerGroup, init: Init, generator: torch.Generator, roots: Sequence[Tensor] | None
) -> dict[str, float]:
    """The relative errors of the kernels."""
    first = group.plans[0]
    effective = [(find_form(conv) or PLAIN).effective_weight(conv, conv.weight) for conv in group.convs]
    shape: dict[str, Any] = {
        "kernel_count": first.kernel_count,
        "dilation": first.dilation,
        "size": first.dilated_size,
        "dense_axes": first.dense_axes,
    }
    largest = largest_elements([conv.weight.detach() for conv in group.convs], effective=effective, **shape)
    if init not in ("fit", AUTO):
        _fill_(group, largest)
        return _kernel_errors(group, effective)
    seed = int(torch.randint(2**62, (), generator=generator))
    fitted = fit_elements(effective, interpolation=first.interpolation, roots=roots, seed=seed, **shape)
    _fill_(group, fitted)
    errors = _kernel_errors(group, effective)
    if any(kernel is not conv.weight for kernel, conv in zip(effective, group.convs, strict=True)):
        # What transforms the elements (weight standardisation) can undo the fit of what they should become.
        _fill_(group, largest)
        others = _kernel_errors(group, effective)
        if any(errors[name] > others[name] for name in errors):
            return others
        _fill_(group, fitted)
    return errors


def _kernel_errors(group: LayerGroup, effective: Sequence[Tensor]) -> dict[str, float]:
    """|new - old| / |old| for the kernels of each layer, as they are convolved; nothing on the meta device."""
    if effective[0].is_meta:
        return {}
    first = group.plans[0]
    shapes = zip(first.kernel_size, first.dilation, first.dilated_size, strict=True)
    places = [[cell + size // 2 for cell in grid_positions(side, step, size)] for side, step, size in shapes]
    cells = torch.meshgrid(*map(torch.tensor, places), indexing="ij")
    errors = {}
    for plan, old, layer in zip(group.plans, effective, group.layers, strict=True):
        left = layer.kernel().to(torch.promote_types(old.dtype, torch.float32))
        left[:, :, *cells] -= old  # type: ignore[index]
        norm = float(old.float().norm())
        errors[plan.name] = float(left.norm()) / norm if norm else 0.0
    return errors
