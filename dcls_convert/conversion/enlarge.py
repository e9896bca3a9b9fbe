"""Give a converted network other windows, while its elements stay in place on the maps.

With bilinear elements, outputs do not change. Elements of other interpolations also spread into the
new cells. Parameters stay the same objects. In a window that grows to one side, the values of
positions change, because they count from the window's centre.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import new_cells, position_limits
from ..layers.dcls_conv import DclsConvNd
from ..networks.wrappers import check_not_wrapped
from ..options import AUTO
from ..placing.place import note_other_windows_, noted_plan
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..planning.windows import notes_on_windows, with_other_window
from ..reports.report import ConversionReport, report_of
from ..running.model_state import unchanged_on_failure
from ..text import join_with_and
from .provenance import NOT_RECORDED, attach_provenance_, provenance_of
from .request import ConversionRequest

ENLARGED = "enlarged"  # entry of a network's provenance: its changes of windows


def is_converted(model: object) -> TypeGuard[nn.Module]:
    """True for a network that has DCLS layers."""
    return isinstance(model, nn.Module) and any(_dcls_layers(model))


def _dcls_layers(model: nn.Module) -> Iterator[DclsConvNd]:
    return (module for module in model.modules() if isinstance(module, DclsConvNd))


def plan_larger_windows(request: ConversionRequest, model: nn.Module) -> ConversionPlan:
    """Return the plan of a converted network, with the windows of the request.

    Args:
        request: The request, which states the window, and no other option of a conversion.
        model: The network in memory.

    Raises:
        PlanError: The request states other options, the model has no plan, or a window does not
            fit.
    """
    check_not_wrapped(model)
    plan = noted_plan(model)
    if plan is None:
        raise PlanError(
            "the model is converted already, but not as a whole: give what convert_ or "
            "load_converted gave; a single layer has set_window_"
        )
    _refuse_other_options(request, plan)
    layers = _layers_of(model, plan)
    larger = _plan_with_windows(plan, request.options.dilated_size)
    for present, planned in zip(plan.layers, larger.layers, strict=True):
        layer = layers[present.name]
        if layer.dilated_kernel_size != present.dilated_size:
            raise PlanError(f"{present.name}: the model has no layer as in its plan")
        _check_positions(layer, planned)
    return larger


def enlarge_windows_(
    request: ConversionRequest, model: nn.Module, larger: ConversionPlan
) -> ConversionReport:
    """Give a converted network in memory the windows of a plan by `plan_larger_windows`.

    Returns:
        The report, whose layers have the relative errors of their kernels.
    """
    errors: dict[str, float] = {}
    values: list[Tensor] = []
    layers = _layers_of(model, larger)
    for module in layers.values():
        if not module.is_tied:
            values.append(module.positions)
            if module.sigma is not None:
                values.append(module.sigma)
    with unchanged_on_failure(model, values=values):
        for group in position_groups(larger.layers):
            errors |= _set_windows_([layers[layer.name] for layer in group], group)
        note_other_windows_(model, larger)
        _add_to_provenance_(model, request)
    return report_of(larger.with_errors(errors, {}))


def _add_to_provenance_(model: nn.Module, request: ConversionRequest) -> None:
    """Add the window to the record of the conversion."""
    record = dict(provenance_of(model) or {})
    before = record.get(ENLARGED)
    change: dict[str, object] = {"dilated_size": request.options.dilated_size}
    if request.command is not None:
        change["command"] = request.command
    record[ENLARGED] = [*(before if isinstance(before, list) else []), change]
    attach_provenance_(model, record)


def _refuse_other_options(request: ConversionRequest, plan: ConversionPlan) -> None:
    """Refuse (PlanError) all options but the window: the first conversion decided the others."""
    free = {"model", "dilated_size", *NOT_RECORDED}
    size = request.network.input_size
    if isinstance(size, Sequence) and tuple(size) == plan.input_size:
        free.add("input_size")
    stated = []
    for record in (request.network, request.options, request.start):
        for option in fields(record):
            value = getattr(record, option.name)
            is_default = value is None if option.default is None else value == option.default
            if not is_default and option.name not in free:
                stated.append(option.name.replace("_", " "))
    if stated:
        raise PlanError(
            f"the model is converted already, so only its window can change: "
            f"omit {join_with_and(stated)}"
        )
    if request.plan_folder is not None:
        raise PlanError("the model is converted already; a plan is for an unconverted network")
    if request.options.dilated_size == AUTO:
        raise PlanError("the model is converted already; for a larger window, state a dilated size")


def _layers_of(model: nn.Module, plan: ConversionPlan) -> dict[str, DclsConvNd]:
    """Return the network's layers, by their names in the plan.

    Raises:
        PlanError: The network has other layers than the plan.
    """
    layers: dict[str, DclsConvNd] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for planned in plan.layers:
        layer = modules.get(planned.name)
        if not isinstance(layer, DclsConvNd):
            raise PlanError(f"{planned.name}: the model has no layer as in its plan")
        layers[planned.name] = layer
    if set(layers.values()) != set(_dcls_layers(model)):
        raise PlanError("the model has other DCLS layers than its plan")
    return layers


def _plan_with_windows(plan: ConversionPlan, size: int | Sequence[int] | str) -> ConversionPlan:
    """Return the plan with other windows for all its layers."""
    layers = [with_other_window(layer, size) for layer in plan.layers]
    old_notes = notes_on_windows(plan.layers)
    notes = [note for note in plan.notes if note not in old_notes] + notes_on_windows(layers)
    return replace(plan, layers=tuple(layers), notes=tuple(notes))


def _check_positions(layer: DclsConvNd, plan: LayerPlan) -> None:
    """Refuse (PlanError) a smaller window if elements of the layer lie outside it."""
    for row, axis in enumerate(layer.learnt_axes):
        side = plan.dilated_size[axis]
        low, high = [end - layer.position_shift(axis, side) for end in position_limits(side)]
        present = layer.dilated_kernel_size[axis]
        # A position beyond the present window counts as a position at its border.
        inside = layer.positions[row].detach().clamp(*position_limits(present))
        if inside.is_meta:
            return
        lowest, highest = map(float, inside.aminmax())
        if low <= lowest and highest <= high:
            continue
        raise PlanError(
            f"{plan.name}: its elements lie from {lowest:.2f} to {highest:.2f} along axis {axis}, "
            f"and a window of {side} has cells from {low} to {high}; use a larger one"
        )


@torch.no_grad()
def _set_windows_(layers: Sequence[DclsConvNd], plans: Sequence[LayerPlan]) -> dict[str, float]:
    """Set the windows of layers that share positions, or of a single layer.

    Returns:
        The relative errors of the kernels, by layer name; none on the meta device.
    """
    old_kernels = [layer.kernel() for layer in layers]
    for layer, plan in zip(layers, plans, strict=True):
        layer.set_window_(plan.dilated_size)
    errors = {}
    for layer, plan, old in zip(layers, plans, old_kernels, strict=True):
        if not old.is_meta:
            errors[plan.name] = _relative_error(layer.kernel(), old, plan)
    return errors


def _relative_error(new: Tensor, old: Tensor, plan: LayerPlan) -> float:
    """Return |new - old| / |old| for the new and the old kernel (O, I, *window) of a layer."""
    cells: list[int] = []  # to add before and after each axis, the last axis first
    sides = zip(new.shape[2:], old.shape[2:], plan.grow_of_axes, strict=True)
    for side, old_side, grow in sides:
        cells = [*new_cells(side, old_side, grow), *cells]
    norm = float(old.norm())
    difference = float((new - F.pad(old, cells)).norm())
    return difference / norm if norm else 0.0
