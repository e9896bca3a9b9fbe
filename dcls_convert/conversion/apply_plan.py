"""Carry out a plan on a model: make the layers, find their values, and put them into the model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..depthwise.devices import DEVICE_TYPES_WITHOUT_FLOAT64
from ..errors import DclsConvertError, PlanError, check_argument
from ..layers.interpolation import find_interpolation
from ..options import AUTO, EXACT, INITS, POSITIONS, Init, Positions, check_choice
from ..placing.place import LayerGroup, find_groups, insert_layers_, make_layers
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify, ignore_messages
from ..reports.report import ConversionReport, report_of
from ..running.model_state import unchanged_on_failure
from ..running.process_settings import full_precision
from ..starts.calibration import CalibrationStatistics, fit_to_outputs_, measure_inputs
from ..starts.images import Calibration, Images, read_calibration_images
from ..starts.start import start_from_kernels_, start_randomly_, take_elements_


def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
    calibration: Images | Calibration | None = None,
    note: Note = ignore_messages,
    notify: Notify = ignore_messages,
) -> ConversionReport:
    """Replace every convolution of the plan by its DCLS layer, which starts from the old kernel.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`. If the plan says that the model is folded, the new layers are
            plain convolutions with the constructed kernels.
        init: As in `convert_`. "exact" needs a plan with an element for every cell
            (`plan_conversion(kernel_count="exact")`). With "random", weights are taken from cells
            of the old kernels, so that weights keep the distribution of the model's initialisation.
            In a model without norms, weights are then scaled so that outputs keep their mean
            square.
        positions: As in `convert_`.
        generator: Source of all randomness; by default, a new one with seed 0.
        calibration: For "fit": images, as in `convert_`.
        note: Called with messages for the user.
        notify: Called with progress: the layers that are next.

    Returns:
        The report of the plan. Each layer that starts from the old kernel has the relative error of
        its kernel and, with a calibration, the relative error of its outputs.

    Raises:
        DclsConvertError: The plan is for another model, or the model does not accept the images.
            After this and any other error, even running out of memory, the model is as it was.
    """
    check_argument("model", model, nn.Module)
    check_argument("plan", plan, ConversionPlan)
    check_choice("init", init, INITS)
    check_choice("positions", positions, POSITIONS)
    if init == AUTO:
        init = "fit"
    statistics = None
    if calibration is not None:
        if init != "fit":
            raise PlanError(f"calibration is for init='fit', not for {init!r}")
        images = calibration
        if not isinstance(images, Calibration):
            # Outputs are not compared here, so no image need be held out.
            images = read_calibration_images(model, plan, images, held_out=(), note=note)
        statistics = measure_inputs(model, find_groups(model, plan), images, notify)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    with unchanged_on_failure(model):
        plan = replace_convs_(
            model,
            plan,
            init=init,
            positions=positions,
            generator=generator,
            statistics=statistics,
            notify=notify,
        )
    return report_of(plan)


@torch.no_grad()
@full_precision()
def replace_convs_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init,
    positions: Positions,
    generator: torch.Generator,
    statistics: CalibrationStatistics | None,
    elements: Mapping[str, Tensor] | None = None,
    notify: Notify,
) -> ConversionPlan:
    """Make all layers, find their values, then replace the convolutions.

    If this function fails, the caller restores the model.

    Args:
        model, plan, positions, generator, notify: As in `apply_plan_`.
        init: As in `apply_plan_`, but never "auto".
        statistics: Statistics of the convolutions' inputs for images, to fit outputs; None to fit
            kernels.
        elements: Weights, positions and sigmas by their names in the converted model. If given,
            the layers take these values instead of a start.

    Returns:
        The plan, with the errors of kernels and outputs after the start.
    """
    if init == EXACT:
        _check_exact_start(plan)
    groups = make_layers(model, plan)
    output_errors: dict[str, float] = {}
    kernel_errors: dict[str, float] = {}
    if elements is not None:
        take_elements_(groups, elements)
    elif init == "random":
        start_randomly_(model, groups, positions, generator)
    else:
        _check_float64(groups)
        start_from_kernels_(groups, statistics, init, notify)
        if statistics is not None:
            output_errors = fit_to_outputs_(model, groups, statistics, notify)
        for group in groups:
            kernel_errors |= group.kernel_errors()
    insert_layers_(model, plan, groups)
    return plan.with_errors(kernel_errors, output_errors)


def _check_float64(groups: Sequence[LayerGroup]) -> None:
    """Refuse (DclsConvertError) to fit on a device that cannot compute in float64."""
    for group in groups:
        for conv in group.convs:
            if conv.weight.device.type in DEVICE_TYPES_WITHOUT_FLOAT64:
                raise DclsConvertError(
                    f"a start from old kernels needs float64, which {conv.weight.device.type} does "
                    "not have; convert on the CPU, then move the model"
                )


def _check_exact_start(plan: ConversionPlan) -> None:
    """Refuse (PlanError) an exact start if the plan cannot keep every cell of the old kernels."""
    for layer in plan.layers:
        cells = layer.old_cells
        is_exact = find_interpolation(layer.interpolation).is_exact_on_cells
        if layer.kernel_count < cells or not is_exact:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that "
                f"keeps them in their cells, but the plan has {layer.kernel_count} and "
                f"{layer.interpolation}; plan with kernel_count='exact'"
            )
