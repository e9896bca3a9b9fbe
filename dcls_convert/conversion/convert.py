"""One conversion, from the request to the converted network."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..networks.source import ModelSource
from ..networks.timm_notes import set_normalisation_
from ..planning.plan import ConversionPlan
from ..progress import Note, Notify, ignore_messages
from ..reports.report import ConversionReport, predict_report
from ..running.model_state import unchanged_on_failure
from ..starts.calibration import CalibrationStatistics
from ..starts.counts_by_error import choose_counts_by_error
from ..starts.images import Calibration, read_calibration_images
from .apply_plan import apply_plan_
from .authors import check_elements, convert_with_authors_elements_
from .before_and_after import compare_with_outputs_before, outputs_before_conversion
from .open_network import build_network, load
from .plan_network import (
    are_counts_chosen_by_error,
    cautions,
    check_stored_plan,
    plan_network,
)
from .provenance import attach_provenance_, describe_conversion
from .request import ConversionRequest, RequestWeights


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did or, in a dry run, would do."""

    request: ConversionRequest
    source: ModelSource | None  # how the network was built; None for a model in memory
    takes_authors_elements: bool  # the weights had elements, which the new layers took over
    report: ConversionReport
    model: nn.Module | None = None  # the converted network; None after a dry run

    @property
    def plan(self) -> ConversionPlan:
        """What replaces what."""
        return self.report.plan


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
        approve: Called with what is planned, before anything that takes long; may raise.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        DclsConvertError: Something does not fit. A model in memory is then as it was, as after any
            other error.
    """
    loaded = load(request, notify=notify, note=note)
    check_elements(request, loaded.weights, note)
    notify("planning")
    chooses_counts = plan is None and are_counts_chosen_by_error(loaded)
    if plan is None:
        plan = plan_network(loaded, request.options)
    else:
        plan = check_stored_plan(loaded, plan)
    for caution in cautions(plan):
        note(caution)
    conversion = Conversion(
        request=request,
        source=loaded.source,
        takes_authors_elements=loaded.authors_weights is not None,
        report=predict_report(plan),
    )
    if request.dry_run:
        return conversion
    approve(conversion)
    network = build_network(loaded, notify=notify)
    if loaded.authors_weights is not None:
        return _convert_with_elements_(conversion, network, loaded.authors_weights, notify)
    # The network has the weights; keeping both would take twice the memory.
    loaded = replace(loaded, weights=None)
    images = _read_images(request, network, plan, note)
    statistics = None
    if chooses_counts:
        counts, statistics = choose_counts_by_error(
            network,
            plan,
            calibration=images,
            notify=notify,
        )
        plan = plan_network(loaded, request.options, counts)
        conversion = replace(conversion, report=predict_report(plan))
    return _convert_(conversion, network, images, statistics, notify, note)


def _read_images(
    request: ConversionRequest, network: nn.Module, plan: ConversionPlan, note: Note
) -> Calibration | None:
    """Return the calibration's images at the plan's input size; None if there is no calibration."""
    if request.calibration is None:
        return None
    return read_calibration_images(
        network,
        plan,
        request.calibration,
        held_out=request.held_out,
        most_images=request.most_images,
        mean=request.mean,
        std=request.std,
        note=note,
    )


def _convert_with_elements_(
    conversion: Conversion, network: nn.Module, weights: RequestWeights, notify: Notify
) -> Conversion:
    """Convert the network in place, with the elements of the authors' layers."""
    request = conversion.request
    notify("converting")
    tensors = [*network.parameters(), *network.buffers()]  # the file's other weights are loaded too
    with unchanged_on_failure(network, values=tensors):
        convert_with_authors_elements_(network, conversion.plan, weights, request.authors_version)
        attach_provenance_(network, describe_conversion(request))
    return replace(conversion, model=network)


def _convert_(
    conversion: Conversion,
    network: nn.Module,
    images: Calibration | None,
    statistics: CalibrationStatistics | None,
    notify: Notify,
    note: Note,
) -> Conversion:
    """Convert the network in place, and compare its outputs. After any error, it is as it was.

    `statistics` are those of the images, if the counts were chosen by them; else None.
    """
    request = conversion.request
    plan = conversion.plan
    notify("converting")
    before = None
    with unchanged_on_failure(network):
        if request.trained and request.start != "random":
            before = outputs_before_conversion(network, plan, images)
        report = apply_plan_(
            network,
            plan,
            init=request.start,
            positions=request.positions,
            generator=torch.Generator().manual_seed(request.seed),
            calibration=statistics or images,
            note=note,
            notify=notify,
        )
        if before is not None:
            outcome = compare_with_outputs_before(before, network, report, images)
            report = replace(report, outcome=outcome)
        attach_provenance_(network, describe_conversion(request))
        if images is not None:
            _state_normalisation_(network, request, plan)
    return replace(conversion, model=network, report=report)


def _state_normalisation_(
    network: nn.Module, request: ConversionRequest, plan: ConversionPlan
) -> None:
    """Write the normalisation that the user stated for images into the network's own config."""
    if request.mean is None or request.std is None or plan.input_size is None:
        return
    set_normalisation_(network, request.mean, request.std, channels=plan.input_size[0])
