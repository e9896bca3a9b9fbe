"""One conversion, from the request to the converted network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..networks.timm_notes import set_normalisation_
from ..placing.place import find_groups
from ..planning.plan import ConversionPlan, DraftPlan
from ..progress import Note, Notify, ignore_messages
from ..reports.report import ConversionReport
from ..starts.calibration import CalibrationStatistics, measure_inputs
from ..starts.counts_by_error import choose_counts_by_error
from ..starts.images import Calibration, read_calibration_images
from ..weights.loading import check_weights
from .apply_plan import replace_convs_
from .authors import (
    check_elements,
    check_plain_convs,
    replaced_kernels,
    translate_authors_elements,
)
from .before_and_after import compare_with_outputs_before, outputs_before_conversion
from .open_network import find_convs_of, open_network
from .plan_network import adopted_plan, cautions, draft_for
from .provenance import attach_provenance_, describe_conversion
from .request import ELEMENTS, ConversionRequest, options_without_effect


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion did or, in a dry run, would do."""

    request: ConversionRequest
    start: str  # what the new layers start from: "random", "fit", ..., or ELEMENTS
    report: ConversionReport
    model: nn.Module | None = None  # the converted network; None after a dry run


def carry_out(
    request: ConversionRequest,
    *,
    plan: ConversionPlan | None = None,
    approve: Callable[[DraftPlan, str], None] = lambda draft, start: None,
    notify: Notify = ignore_messages,
    note: Note = ignore_messages,
) -> Conversion:
    """Carry out a request; a dry run ends with its plan. A model in memory changes in place.

    Args:
        request: The request.
        plan: The plan of `request.plan_folder`, which was made for the same network.
        approve: Called with the draft of the plan and the name of the start, before anything that
            takes long; may raise.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        DclsConvertError: Something does not fit. A model in memory is then as it was, as after any
            other error.
    """
    for sentence in options_without_effect(request):
        note(sentence)
    network, weights = open_network(
        request.network, offline=request.dry_run, notify=notify, note=note
    )
    check_elements(request, weights, note)
    draft: DraftPlan
    if plan is not None:
        draft = adopted_plan(plan, network.structure, network.source)
    else:
        notify("finding convolutions")
        convs = find_convs_of(network, request.network)
        notify("planning")
        draft = draft_for(request.network, request.plan_options, convs, network.source, weights)

    start: str = request.init
    elements: Mapping[str, Tensor] | None = None
    lacking: list[str] = []  # names of tensors that the weights may lack
    if weights is not None:
        lacking += weights.new_classifier
    if weights is not None and weights.elements:
        start = ELEMENTS
        elements = translate_authors_elements(weights, draft, request.start.authors_version)
        check_plain_convs(network.structure, draft, weights.where)
        lacking += replaced_kernels(draft)
    for caution in cautions(draft):
        note(caution)
    approve(draft, start)
    if request.dry_run:
        if weights is not None:  # otherwise, loading finds out what does not fit
            check_weights(network.structure, weights.entries, weights.where, optional=lacking)
        return Conversion(
            request=request, start=start, report=ConversionReport(plan=draft.with_counts())
        )

    with network.unchanged_on_failure(weights):
        model = network.build(weights, lacking, notify)
        weights = None  # the network has them; keeping both would take twice the memory
        images = _read_images(request, model, draft, note)
        statistics = None
        if images is not None:
            statistics = measure_inputs(model, find_groups(model, draft), images, notify)
        chosen = None
        if plan is None and request.counts_follow_errors:
            groups = find_groups(model, draft)
            chosen = choose_counts_by_error(draft, groups, statistics, notify)
        plan = draft.with_counts(chosen)
        report = _replace_and_compare_(
            request, model, plan, images, statistics=statistics, elements=elements, notify=notify
        )
        attach_provenance_(model, describe_conversion(request))
        if images is not None:
            _state_normalisation_(model, request, plan)
    return Conversion(request=request, start=start, report=report, model=model)


def _read_images(
    request: ConversionRequest, network: nn.Module, draft: DraftPlan, note: Note
) -> Calibration | None:
    """Return the calibration's images at the plan's input size; None if there is no calibration."""
    start = request.start
    if start.calibration is None:
        return None
    return read_calibration_images(
        network,
        draft,
        start.calibration,
        held_out=start.held_out,
        most_images=start.most_images,
        mean=start.mean,
        std=start.std,
        note=note,
    )


def _replace_and_compare_(
    request: ConversionRequest,
    network: nn.Module,
    plan: ConversionPlan,
    images: Calibration | None,
    *,
    statistics: CalibrationStatistics | None,
    elements: Mapping[str, Tensor] | None,
    notify: Notify,
) -> ConversionReport:
    """Replace the network's convolutions, and say how close the outputs of a trained one stayed.

    Args:
        images: The calibration's images, to compare outputs on; None to take random ones.
        statistics: What the convolutions see in these images.
        elements: See `replace_convs_`.
    """
    notify("converting")
    before = None
    if elements is None and request.network.trained and request.init != "random":
        before = outputs_before_conversion(network, plan, images)
    plan = replace_convs_(
        network,
        plan,
        init=request.init,
        positions=request.start.positions,
        generator=torch.Generator().manual_seed(request.network.seed),
        statistics=statistics,
        elements=elements,
        notify=notify,
    )
    outcome = None
    if before is not None:
        outcome = compare_with_outputs_before(before, network, plan, images)
    return ConversionReport(plan=plan, outcome=outcome)


def _state_normalisation_(
    network: nn.Module, request: ConversionRequest, plan: ConversionPlan
) -> None:
    """Write the normalisation that the user stated for images into the network's own config."""
    start = request.start
    if start.mean is None or start.std is None or plan.input_size is None:
        return
    set_normalisation_(network, start.mean, start.std, channels=plan.input_size[0])
