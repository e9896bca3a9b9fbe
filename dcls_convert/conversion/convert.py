"""One conversion, from the request to the converted network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..fitting.calibrate import CalibrationStatistics
from ..fitting.calibration_images import Calibration, calibrate
from ..fitting.counts import choose_counts_by_error
from ..fitting.image_files import normalisation_of
from ..fitting.warm_start import draw_fit_seed
from ..networks.measure import not_measured_text
from ..networks.pretrained_cfg import set_normalisation_
from ..networks.running import unchanged_on_failure
from ..networks.source import ModelSource
from ..options import AUTO, ERROR_SCOPE
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify, ignore_messages, logger
from ..reports.report import ConversionReport, predict_report
from .apply_plan import LayerErrors, apply_plan_
from .authors import AuthorsWeights, convert_with_authors_weights_
from .decide import check_start, check_stored_plan, decide_options, make_checked_plan
from .load import LoadedNetwork, RequestWeights, build_network, load
from .outputs import compare_with_outputs_before, outputs_before_conversion
from .provenance import attach_provenance_, describe_conversion
from .request import ConversionRequest

MANY_LINES = 1_000_000  # kernel lines; one CPU core fits about 13,000 per second


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did or, in a dry run, would do."""

    request: ConversionRequest
    source: ModelSource | None  # how the network was built; None for a model in memory
    takes_authors_elements: bool  # the weights had elements, which the new layers took over
    plan: ConversionPlan
    report: ConversionReport
    model: nn.Module | None  # the converted network; None after a dry run
    # |new - old| / |old| of the outputs for random images; None if outputs were not compared.
    random_output_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """The network with its values, and what its start needs."""

    network: nn.Module
    images: Calibration | None
    statistics: CalibrationStatistics | None = None  # of the images, if they chose the counts


def carry_out(
    request: ConversionRequest,
    *,
    plan: ConversionPlan | None = None,
    approve: Callable[[Conversion], None] = lambda _: None,
    notify: Notify = ignore_messages,
    note: Note = ignore_messages,
) -> Conversion:
    """Carry out a request; a dry run ends with its plan. A model in memory changes in place.

    Args:
        request: The request.
        plan: The plan of `request.plan_folder`, which was made for the same network.
        approve: Called with what is planned, before anything that takes long; may raise. If kernel
            counts are still to be measured, those of the plan are not final.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        DclsConvertError: Something does not fit. A model in memory is then as it was, as after any
            other error.
    """
    loaded, weights = load(request, notify=notify, note=note)
    check_start(request, weights, note)
    notify("planning")
    plan, counts_are_final = _first_plan(loaded, weights, plan)
    if plan.not_measured is not None:
        note(not_measured_text(plan.not_measured))
    conversion = _planned(loaded, weights, plan)
    if request.dry_run:
        return conversion
    approve(conversion)
    network = build_network(loaded, weights, notify=notify)
    ready = _Ready(network=network, images=_read_images(request, network, plan, note))
    if not counts_are_final:
        plan, ready = _measured(loaded, weights, plan, ready, notify)
        conversion = _planned(loaded, weights, plan)
        approve(conversion)
    authors = None if weights is None else weights.authors
    weights = None  # the network has the others; keeping both would take twice the memory
    return _convert_network_(conversion, ready, authors, notify, note)


def _first_plan(
    loaded: LoadedNetwork, weights: RequestWeights | None, given: ConversionPlan | None
) -> tuple[ConversionPlan, bool]:
    """Return the plan before anything is measured, and whether its kernel counts are final.

    With the scope "error", they are not: the plan has those of the scope "model".
    """
    if given is not None:
        return check_stored_plan(loaded, given), True
    options = decide_options(loaded.request, loaded.request.options, weights)
    if options.scope == ERROR_SCOPE and options.kernel_count == AUTO:
        options = replace(options, scope="model")
        return make_checked_plan(loaded, weights, options), False
    return make_checked_plan(loaded, weights, options), True


def _planned(
    loaded: LoadedNetwork, weights: RequestWeights | None, plan: ConversionPlan
) -> Conversion:
    """Return what a conversion with this plan would do."""
    return Conversion(
        request=loaded.request,
        source=loaded.source,
        takes_authors_elements=weights is not None and weights.authors is not None,
        plan=plan,
        report=predict_report(plan),
        model=None,
    )


def _measured(
    loaded: LoadedNetwork,
    weights: RequestWeights | None,
    plan: ConversionPlan,
    ready: _Ready,
    notify: Notify,
) -> tuple[ConversionPlan, _Ready]:
    """Return the plan with counts chosen by the error of each layer, and the images' statistics."""
    request = loaded.request
    counts, statistics = choose_counts_by_error(
        ready.network,
        plan,
        seed=draw_fit_seed(torch.Generator().manual_seed(request.seed)),
        calibration=ready.images,
        notify=notify,
    )
    options = replace(request.options, scope=ERROR_SCOPE)
    measured_plan = make_checked_plan(loaded, weights, options, measured_counts=counts)
    return measured_plan, replace(ready, statistics=statistics)


def _read_images(
    request: ConversionRequest, network: nn.Module, plan: ConversionPlan, note: Note
) -> Calibration | None:
    """Return the calibration's images at the plan's input size; None if there is no calibration."""
    if request.calibration is None:
        return None
    return calibrate(
        network,
        plan,
        request.calibration,
        held_out=request.held_out,
        most_images=request.most_images,
        mean=request.mean,
        std=request.std,
        note=note,
    )


def _convert_network_(
    conversion: Conversion,
    ready: _Ready,
    authors: AuthorsWeights | None,
    notify: Notify,
    note: Note,
) -> Conversion:
    """Convert the network in place, and compare its outputs. After any error, it is as it was."""
    request = conversion.request
    plan = conversion.plan
    model = ready.network
    notify("converting")
    keeps_outputs = authors is None and request.trained and request.start != "random"
    outcome = None
    random_output_error = None
    with unchanged_on_failure(model, values=_overwritten_tensors(ready, authors)):
        before = outputs_before_conversion(model, plan, ready.images) if keeps_outputs else None
        errors = _start_layers_(conversion, ready, authors, notify, note)
        if before is not None:
            outcome, random_output_error = compare_with_outputs_before(
                before, model, plan, ready.images, errors.kernel
            )
        attach_provenance_(model, describe_conversion(request))
        if request.mean is not None and request.std is not None and plan.input_size is not None:
            channels = plan.input_size[0]
            stated = normalisation_of(model, channels, request.mean, request.std)
            set_normalisation_(model, stated.mean, stated.std, channels=channels)
    layers = []
    for layer in plan.layers:
        layers.append(
            replace(
                layer,
                fit_error=errors.kernel.get(layer.name),
                output_error=errors.output.get(layer.name),
                error_reasons=errors.reasons.get(layer.name, ()),
            )
        )
    report = replace(conversion.report, layers=tuple(layers), outcome=outcome)
    return replace(conversion, model=model, report=report, random_output_error=random_output_error)


def _overwritten_tensors(ready: _Ready, authors: AuthorsWeights | None) -> Sequence[Tensor]:
    """Return the tensors of the network whose values the conversion changes in place."""
    tensors = [*ready.network.parameters(), *ready.network.buffers()]
    if authors is not None:
        return tensors  # the file's other weights are loaded along with its elements
    if ready.images is not None:
        return [tensor for tensor in tensors if tensor.dim() == 1]  # biases and running means
    return []


def _start_layers_(
    conversion: Conversion,
    ready: _Ready,
    authors: AuthorsWeights | None,
    notify: Notify,
    note: Note,
) -> LayerErrors:
    """Put DCLS layers with their initial values into the network, and return their errors."""
    request = conversion.request
    plan = conversion.plan
    if authors is not None:
        convert_with_authors_weights_(ready.network, plan, authors, version=request.authors_version)
        return LayerErrors(kernel={}, output={})
    lines = sum(layer.lines for layer in plan.layers)
    if request.start == "fit" and lines > MANY_LINES and request.device is None:
        note(f"fitting elements to {lines:,} kernels takes minutes on a CPU; a GPU is faster")
    errors = apply_plan_(
        ready.network,
        plan,
        init=request.start,
        positions=request.positions,
        generator=torch.Generator().manual_seed(request.seed),
        calibration=ready.statistics or ready.images,
        note=note,
        notify=notify,
    )
    for name, error in errors.kernel.items():
        logger.debug("%s: relative error of the kernel %.4g", name, error)
    for name, error in errors.output.items():
        logger.debug("%s: relative error of the outputs for images %.4g", name, error)
    return errors
