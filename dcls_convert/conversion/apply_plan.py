"""Carry out a plan on a model: make the layers, find their values, and put them into the model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..depthwise.devices import DEVICE_TYPES_WITHOUT_FLOAT64
from ..errors import DclsConvertError, PlanError, check_argument
from ..layers.interpolation import find_interpolation
from ..options import AUTO, EXACT, INITS, POSITIONS, Init, Positions, check_choice
from ..placing.place import LayerGroup, insert_layers_, make_layers
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify, ignore_messages
from ..reports.report import ConversionReport, predict_report
from ..running.model_state import unchanged_on_failure
from ..running.process_settings import full_precision
from ..starts.calibration import CalibrationStatistics, fit_to_outputs_, measure_inputs
from ..starts.images import Calibration, Images, read_calibration_images
from ..starts.start import start_from_kernels_, start_randomly_


@torch.no_grad()
@full_precision()
def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
    calibration: Images | Calibration | CalibrationStatistics | None = None,
    note: Note = ignore_messages,
    notify: Notify = ignore_messages,
) -> ConversionReport:
    """Replace every convolution of the plan by its DCLS layer, with values from the old kernels.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`. If it says that the model is folded, plain convolutions with
            the constructed kernels are placed.
        init: As in `convert_`. "exact" needs a plan with an element for every cell
            (`plan_conversion(kernel_count="exact")`). With "random", weights are cells of the old
            kernels, so that they keep the distribution of the model's initialisation. In a model
            without norms, they are then scaled so that outputs keep their mean square.
        positions: As in `convert_`.
        generator: Source of all randomness; by default, a new one with seed 0.
        calibration: For "fit": images, as in `convert_`; or the statistics of a pass over them.
        note: Called with messages for the user.
        notify: Called with progress: which layers are next.

    Returns:
        The report of the plan. Each of its layers has the relative error of its kernel, if it
        starts from the old one; with a calibration, also that of its outputs.

    Raises:
        DclsConvertError: The model is not the one that the plan is for, or does not accept the
            images. After this and any other error, running out of memory included, the model is
            as it was.
    """
    check_argument("model", model, nn.Module)
    check_argument("plan", plan, ConversionPlan)
    init = _checked_init(plan, init, positions, is_calibrated=calibration is not None)
    groups = make_layers(model, plan)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    output_errors: dict[str, float] = {}
    kernel_errors: dict[str, float] = {}
    if init == "random":
        start_randomly_(model, groups, positions, generator)
    else:
        _check_float64(groups)
        statistics = _statistics(model, plan, groups, calibration, note, notify)
        start_from_kernels_(groups, statistics, init, notify)
        if statistics is not None:
            output_errors = fit_to_outputs_(model, groups, statistics, notify)
        for group in groups:
            kernel_errors |= group.kernel_errors()
    with unchanged_on_failure(model):
        insert_layers_(model, plan, groups)
    return _report_with_errors(plan, kernel_errors, output_errors)


def _report_with_errors(
    plan: ConversionPlan,
    kernel_errors: Mapping[str, float],
    output_errors: Mapping[str, float],
) -> ConversionReport:
    """Return the plan's report; its layers have the errors that the start left."""
    layers = []
    for layer in plan.layers:
        layer = replace(
            layer,
            fit_error=kernel_errors.get(layer.name),
            output_error=output_errors.get(layer.name),
        )
        layers.append(layer)
    return predict_report(replace(plan, layers=tuple(layers)))


def _check_float64(groups: Sequence[LayerGroup]) -> None:
    """Refuse to fit on a device that cannot compute in float64."""
    for group in groups:
        for conv in group.convs:
            if conv.weight.device.type in DEVICE_TYPES_WITHOUT_FLOAT64:
                raise DclsConvertError(
                    f"a start from old kernels needs float64, which {conv.weight.device.type} does "
                    "not have; convert on the CPU, then move the model"
                )


def _checked_init(
    plan: ConversionPlan, init: Init, positions: Positions, *, is_calibrated: bool
) -> Init:
    """Return the start, with "auto" resolved.

    Raises:
        PlanError: It is not known, is not for a calibration, or needs more elements than planned.
    """
    check_choice("init", init, INITS)
    check_choice("positions", positions, POSITIONS)
    if init == AUTO:
        return "fit"
    if is_calibrated and init != "fit":
        raise PlanError(f"calibration is for init='fit', not for {init!r}")
    if init != EXACT:
        return init
    for layer in plan.layers:
        cells = layer.old_cells
        is_exact = find_interpolation(layer.interpolation).is_exact_on_cells
        if layer.kernel_count < cells or not is_exact:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that "
                f"keeps them in their cells, but the plan has {layer.kernel_count} and "
                f"{layer.interpolation}; plan with kernel_count='exact'"
            )
    return init


def _statistics(
    model: nn.Module,
    plan: ConversionPlan,
    groups: Sequence[LayerGroup],
    calibration: Images | Calibration | CalibrationStatistics | None,
    note: Note,
    notify: Notify,
) -> CalibrationStatistics | None:
    """Return what the old convolutions see in the calibration's images; None without images."""
    if calibration is None or isinstance(calibration, CalibrationStatistics):
        return calibration
    if not isinstance(calibration, Calibration):
        # Outputs are not compared here, so no image need be held out.
        calibration = read_calibration_images(model, plan, calibration, held_out=(), note=note)
    return measure_inputs(model, groups, calibration, notify)
