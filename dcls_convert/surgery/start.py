"""Values for layers that are made and not in the model yet, from the kernels of the convolutions
that they replace.

Axes: O output channels, I input channels per group, D cells of the dense axes, E kernel elements, A
learnt axes.
"""

import torch
from torch import Tensor, nn

from ..errors import PlanError, listed
from ..fitting.calibrate import NewLayer, Seen, fit_to_outputs_, look
from ..fitting.groups import LayerGroup, make_layers
from ..fitting.images import Calibration, Images, calibrate
from ..fitting.warm_start import fit_elements, fit_seed
from ..layers.elements import Elements, first_cells, random_positions
from ..layers.interpolation import find_interpolation
from ..networks.running import reproducible, unchanged_on_failure
from ..options import AUTO, EXACT, INITS, POSITIONS, Init, Positions
from ..planning.plan import ConversionPlan
from ..progress import Notify, silent
from .place import put_layers_


@torch.no_grad()
@reproducible()
def apply_plan_(
    model: nn.Module,
    plan: ConversionPlan,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    generator: torch.Generator | None = None,
    calibration: Images | Calibration | Seen | None = None,
    note: Notify = silent,
    notify: Notify = silent,
) -> dict[str, float]:
    """Replace every convolution of the plan by its DCLS layer, with values from the old kernels.

    Args:
        model: The model that the plan was made for; changed in place. May be on the meta device.
        plan: From `plan_conversion`. If it says that the model is folded, plain convolutions with
            the constructed kernels are placed.
        init: As in `convert_`. "exact" needs a plan with an element for every cell
            (`plan_conversion(kernel_count="exact")`). The weights of "random" elements are cells of
            the old kernels, so that they stay distributed as the model initialises them.
        positions: As in `convert_`.
        generator: Source of all randomness; seeded with 0 without it.
        calibration: For "fit": images, as in `convert_`; or what the model has seen in them.
        note: Told what a user should know.
        notify: Told which layers are next.

    Returns:
        For every layer by name the relative error of its constructed kernel, |new - old| / |old|;
        nothing for "random" and on the meta device.

    Raises:
        DclsConvertError: The model is not the one that was planned for, or does not take the
            images. Whatever is raised, running out of memory included, the model is then unchanged.
    """
    _check_start(plan, init, positions)
    groups = make_layers(model, plan)
    generator = generator or torch.Generator().manual_seed(0)
    seed = fit_seed(generator)
    calibrated: list[NewLayer] = []
    if init == "random":
        for group in groups:
            layer, uniform = group.plans[0], positions != "normal"
            weights = [
                first_cells(conv.weight.detach(), layer.kernel_count, layer.dense_axes)
                for conv in group.convs
            ]
            size = layer.extents if positions == "kernel" else layer.dilated_size
            places = random_positions(
                weights[0], size, layer.dense_axes, generator, uniform=uniform
            )
            _fill_(group, (weights, places))
    else:
        if calibration is not None and not isinstance(calibration, Seen):
            calibration = look(
                model, groups, calibrate(model, plan, calibration, note=note), notify
            )
        first, done, total = (
            1,
            0,
            sum(layer.dense_weights for layer in plan.layers),
        )  # which time goes with
        for group in groups:
            last = first + len(group.plans) - 1
            which = f"layer {last}" if last == first else f"layers {first} to {last}"
            notify(f"fitting {group.title}, {which} of {len(plan.layers)}", done, total)
            roots = None if calibration is None else calibration.roots(group)
            _fill_from_kernels_(group, roots, init, seed)
            first, done = last + 1, done + sum(layer.dense_weights for layer in group.plans)
        calibrated = (
            [] if calibration is None else fit_to_outputs_(model, groups, calibration, notify)
        )
        if lost := [each.name for each in calibrated if each.home is None]:
            note(
                f"{listed(lost)} have neither a bias nor a BatchNorm behind them, so the means of "
                "their outputs could "
                "not be set back to the old ones"
            )
    errors: dict[str, float] = {}
    for group in groups if init != "random" else ():
        errors |= group.kernel_errors()
    with unchanged_on_failure(
        model, values=[each.home for each in calibrated if each.home is not None]
    ):
        put_layers_(model, plan, groups)
        for each in calibrated:
            if each.home is not None:
                each.home.add_(each.offset.to(each.home))
    return errors


def _check_start(plan: ConversionPlan, init: Init, positions: Positions) -> None:
    """Refuse ways to start that do not exist, and an exact start for which the plan has too few
    elements.
    """
    for name, value, allowed in [("init", init, INITS), ("positions", positions, POSITIONS)]:
        if value not in allowed:
            raise PlanError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    for layer in plan.layers if init == EXACT else ():
        cells = layer.dense_weights // layer.lines
        if layer.kernel_count < cells or not find_interpolation(layer.interpolation).exact_on_cells:
            raise PlanError(
                f"{layer.name}: an exact start needs {cells} elements and an interpolation that "
                "keeps them in their "
                f"cells, the plan has {layer.kernel_count}, {layer.interpolation}; plan with "
                "kernel_count='exact'"
            )


def _fill_(group: LayerGroup, elements: Elements) -> None:
    weights, positions = elements
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)
    group.layers[0].positions.copy_(positions)  # which all layers of the group share


def _fill_from_kernels_(group: LayerGroup, roots: Tensor | None, init: Init, seed: int) -> None:
    count, effective = group.plans[0].kernel_count, group.effective_kernels()
    largest = group.box.largest(
        [conv.weight.detach() for conv in group.convs], count, effective=effective
    )
    if init not in ("fit", AUTO):
        _fill_(group, largest)
        return
    fitted = fit_elements(effective, group.box, kernel_count=count, roots=roots, seed=seed)
    _fill_(group, fitted)
    if any(layer.form.weight for layer in group.layers):
        # What transforms the elements (weight standardisation) can undo the fit of what they should
        # become.
        errors = group.kernel_errors()
        _fill_(group, largest)
        others = group.kernel_errors()
        if not any(errors[name] > others[name] for name in errors):
            _fill_(group, fitted)
