"""Values for layers that are made but not in the model yet, from the kernels that they replace.

Axes: O output channels, I input channels per group, D cells of the dense axes, E kernel elements, A
learnt axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..fitting.calibrate import CalibrationStatistics, fit_to_outputs_, measure_inputs
from ..fitting.calibrated_layer import CalibratedLayer
from ..fitting.groups import LayerGroup, make_layers
from ..fitting.images import Calibration, Images, calibrate
from ..fitting.warm_start import fit_elements, fit_seed
from ..layers.elements import Elements, first_cells, random_positions
from ..layers.interpolation import find_interpolation
from ..networks.initialisation import has_norms, output_power
from ..networks.running import full_precision, unchanged_on_failure
from ..options import AUTO, EXACT, INITS, POSITIONS, Init, Positions
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from ..text import listed
from .place import put_layers_


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerErrors:
    """The errors that a start leaves, by the layer's name."""

    # |new - old| / |old| of the constructed kernels; empty for "random" and on the meta device.
    kernel: dict[str, float]
    # |new - old| / |old| of the outputs at the sampled places of a calibration's images, given the
    # input from the layers that are converted already; empty without a calibration.
    output: dict[str, float]
    # Why a layer's outputs may have lost much; only where a calibration knows a reason.
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)


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
    note: Notify = silent,
    notify: Notify = silent,
) -> LayerErrors:
    """Replace every convolution of the plan by its DCLS layer, with values from the old kernels.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`. If it says that the model is folded, plain convolutions with
            the constructed kernels are placed.
        init: As in `convert_`. "exact" needs a plan with an element for every cell
            (`plan_conversion(kernel_count="exact")`). The weights of "random" elements are cells of
            the old kernels, so that they stay distributed as the model initialises them. In a model
            without norms, they are then scaled: outputs get the mean square of the old ones.
        positions: As in `convert_`.
        generator: Source of all randomness; without it, a new one with seed 0.
        calibration: For "fit": images, as in `convert_`; or the statistics of a pass over them.
        note: Called with what a user should know.
        notify: Called with which layers are next.

    Returns:
        The relative errors of the kernels, and with a calibration those of the outputs and reasons
        for them.

    Raises:
        DclsConvertError: The model is not the one that was planned for, or does not take the
            images. After this and any other error, running out of memory included, the model is
            as it was.
    """
    _check_start(plan, init, positions)
    if calibration is not None and init not in ("fit", AUTO):
        raise PlanError(f"calibration is for init='fit', not for {init!r}")
    groups = make_layers(model, plan)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    seed = fit_seed(generator)
    calibrated: list[CalibratedLayer] = []
    kernel_errors: dict[str, float] = {}
    if init == "random":
        for group in groups:
            _fill_randomly_(group, positions, generator)
        if not has_norms(model):
            _scale_to_old_kernels_(groups)
    else:
        statistics = _statistics(model, plan, groups, calibration, note, notify)
        _fill_all_from_kernels_(groups, statistics, init, seed, notify)
        if statistics is not None:
            calibrated = fit_to_outputs_(model, groups, statistics, notify)
            _note_kept_fits(calibrated, note)
            _note_shifted_means(calibrated, note)
        for group in groups:
            kernel_errors |= group.kernel_errors()

    # Biases and running means of the model, which take the mean shifts of the new layers.
    shifted: list[Tensor] = []
    for layer in calibrated:
        if layer.shift_target is not None:
            shifted.append(layer.shift_target)
    with unchanged_on_failure(model, values=shifted):
        put_layers_(model, plan, groups)
        for layer in calibrated:
            if layer.shift_target is not None:
                layer.shift_target.add_(layer.target_change.to(layer.shift_target))
    output_errors: dict[str, float] = {}
    for layer in calibrated:
        if layer.output_error is not None:
            output_errors[layer.name] = layer.output_error
    reasons = {layer.name: layer.reasons for layer in calibrated if layer.reasons}
    return LayerErrors(kernel=kernel_errors, output=output_errors, reasons=reasons)


def _check_start(plan: ConversionPlan, init: Init, positions: Positions) -> None:
    """Refuse unknown ways to start, and an exact start from a plan with too few elements."""
    if init not in INITS:
        raise PlanError(f"init={init!r} must be one of {', '.join(INITS)}")
    if positions not in POSITIONS:
        raise PlanError(f"positions={positions!r} must be one of {', '.join(POSITIONS)}")
    if init != EXACT:
        return
    for layer in plan.layers:
        cells = layer.old_cells
        exact_on_cells = find_interpolation(layer.interpolation).exact_on_cells
        if layer.kernel_count < cells or not exact_on_cells:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that "
                f"keeps them in their cells, the plan has {layer.kernel_count}, "
                f"{layer.interpolation}; plan with kernel_count='exact'"
            )


def _note_kept_fits(calibrated: Sequence[CalibratedLayer], note: Notify) -> None:
    """Tell the user of layers of which the images show too little."""
    count = sum(layer.keeps_fit for layer in calibrated)
    if count:
        note(
            f"{count} of {len(calibrated)} layers keep what was fitted to their kernels: the "
            "images show too few places of them; give more or larger images"
        )


def _note_shifted_means(calibrated: Sequence[CalibratedLayer], note: Notify) -> None:
    """Tell the user of layers whose output means cannot be set back to the old ones."""
    still_shifted = [layer.name for layer in calibrated if layer.shift_target is None]
    if still_shifted:
        note(
            f"{listed(still_shifted)} have neither a bias nor a BatchNorm behind them, so the "
            "means of their outputs could not be set back to the old ones"
        )


def _fill_(group: LayerGroup, elements: Elements) -> None:
    weights, positions = elements
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)
    group.layers[0].positions.copy_(positions)  # which all layers of the group share


def _fill_randomly_(group: LayerGroup, positions: Positions, generator: torch.Generator) -> None:
    """Random positions; the weights are the first cells of the old kernels."""
    plan = group.plans[0]
    weights = []
    for conv in group.convs:
        weights.append(first_cells(conv.weight.detach(), plan.kernel_count, plan.dense_axes))
    size = plan.dilated_size
    if positions == "kernel":
        size = plan.extents
    elif positions == "uniform":
        reaches = zip(*(layer.reach for layer in group.plans), strict=True)  # by axis
        size = tuple(map(min, reaches))
    uniform = positions != "normal"
    drawn_positions = random_positions(
        weights[0], size, plan.dense_axes, generator, uniform=uniform
    )
    _fill_(group, (weights, drawn_positions))


def _scale_to_old_kernels_(groups: Sequence[LayerGroup]) -> None:
    """Give the outputs of layers the mean square that they have with the old kernels.

    It would be smaller, as there are fewer elements than cells, and an element is spread over
    several cells.
    """
    for group in groups:
        for old_kernel, layer in zip(group.effective_kernels(), group.layers, strict=True):
            if layer.weight.is_meta:
                continue
            power = output_power(layer.kernel())
            if power > 0:  # kernels may start from zero
                layer.weight.mul_(math.sqrt(output_power(old_kernel) / power))


def _statistics(
    model: nn.Module,
    plan: ConversionPlan,
    groups: Sequence[LayerGroup],
    calibration: Images | Calibration | CalibrationStatistics | None,
    note: Notify,
    notify: Notify,
) -> CalibrationStatistics | None:
    """What the old convolutions see in the images of a calibration; None without one."""
    if calibration is None or isinstance(calibration, CalibrationStatistics):
        return calibration
    if not isinstance(calibration, Calibration):
        # Outputs are not compared here, so no image need be held out.
        calibration = calibrate(model, plan, calibration, held_out=(), note=note)
    return measure_inputs(model, groups, calibration, notify)


def _fill_all_from_kernels_(
    groups: Sequence[LayerGroup],
    statistics: CalibrationStatistics | None,
    init: Init,
    seed: int,
    notify: Notify,
) -> None:
    """Fill group after group, and tell which layers are next."""
    layers = 0
    total_weights = 0
    for group in groups:
        layers += len(group.plans)
        total_weights += _dense_weights(group)
    first = 1  # number of the group's first layer
    done_weights = 0  # the time for a group grows with its dense weights
    for group in groups:
        last = first + len(group.plans) - 1
        which = f"layer {last}" if last == first else f"layers {first} to {last}"
        notify(f"fitting {group.title}, {which} of {layers}", done_weights, total_weights)
        covariance_roots = None
        if statistics is not None:
            covariance_roots = statistics.covariance_roots(group)
        _fill_from_kernels_(group, covariance_roots, init, seed)
        first = last + 1
        done_weights += _dense_weights(group)


def _dense_weights(group: LayerGroup) -> int:
    return sum(plan.dense_weights for plan in group.plans)


def _fill_from_kernels_(
    group: LayerGroup, covariance_roots: Tensor | None, init: Init, seed: int
) -> None:
    """Fill the layers with the largest cells of the old kernels, or with fitted elements.

    Args:
        covariance_roots: For each input channel a square root of the covariance of its patches,
            (in_channels, S, S) with S cells of the box; fits are then close in outputs. None: close
            in kernels.
    """
    count = group.plans[0].kernel_count
    effective = group.effective_kernels()
    kernels = [conv.weight.detach() for conv in group.convs]
    largest = group.box.largest(kernels, count, effective=effective)
    if init not in ("fit", AUTO):
        _fill_(group, largest)
        return
    fitted = fit_elements(
        effective, group.box, kernel_count=count, covariance_roots=covariance_roots, seed=seed
    )
    _fill_(group, fitted)
    if any(layer.form.transform_weight for layer in group.layers):
        # Weight standardisation transforms the elements and can undo the fit. The largest cells
        # stay if they are better for any layer of the group.
        fitted_errors = group.kernel_errors()
        _fill_(group, largest)
        largest_errors = group.kernel_errors()
        for name, error in fitted_errors.items():
            if error > largest_errors[name]:
                return
        _fill_(group, fitted)
