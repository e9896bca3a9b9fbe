"""Carry out one conversion, from the request to the converted network."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..networks.timm_notes import set_normalisation_
from ..placing.place import find_groups
from ..planning.plan import ConversionPlan, DraftPlan
from ..progress import Note, Notify, ignore_messages
from ..reports.report import ConversionReport, report_of
from ..running.model_state import unchanged_on_failure
from ..starts.calibration import CalibrationStatistics, measure_inputs
from ..starts.counts_by_error import choose_counts_by_error
from ..starts.images import Calibration, read_calibration_images
from ..weights.loading import check_weights
from .apply_plan import replace_convs_
from .authors import check_elements, names_lacking, translated_elements
from .before_and_after import compare_with_outputs_before, outputs_before_conversion
from .enlarge import enlarge_windows_, is_converted, plan_larger_windows
from .open_network import OpenNetwork, examine, give_values_, open_network
from .plan_network import adopted_plan, cautions, draft_for_request
from .provenance import attach_provenance_, describe_conversion
from .request import (
    FROM_CONVERTED,
    FROM_ELEMENTS,
    ConversionRequest,
    NetworkRequest,
    RequestWeights,
    options_without_effect,
)


@dataclass(kw_only=True)
class Prepared:
    """A decided conversion, before anything has changed.

    Only kernel counts that follow errors are still open. `finish_` drops the weights as soon as the
    network has them.
    """

    request: ConversionRequest
    draft: DraftPlan
    # Start of the new layers: "random", "fit", ..., FROM_ELEMENTS or FROM_CONVERTED.
    start_name: str
    network: OpenNetwork | None  # None for a network that is converted already
    is_adopted: bool = False  # whether the draft is the plan of a folder
    weights: RequestWeights | None = None
    elements: Mapping[str, Tensor] | None = None  # see `replace_convs_`

    def predicted(self) -> "Conversion":
        """Return the predicted conversion, which is the result of a dry run."""
        report = report_of(self.draft.with_counts())
        return Conversion(request=self.request, start_name=self.start_name, report=report)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Result of a conversion or, in a dry run, its prediction."""

    request: ConversionRequest
    start_name: str  # as in `Prepared`
    report: ConversionReport
    model: nn.Module | None = None  # the converted network; None after a dry run


def carry_out(
    request: ConversionRequest,
    *,
    notify: Notify = ignore_messages,
    warn: Note = ignore_messages,
    note: Note = ignore_messages,
) -> Conversion:
    """Carry out a request: `prepare`, then `finish_`, unless it is a dry run.

    A model in memory changes in place.

    Raises:
        DclsConvertError: Something does not fit. After any error, a model in memory is as it was.
    """
    prepared = prepare(request, notify=notify, warn=warn, note=note)
    if request.dry_run:
        return prepared.predicted()
    return finish_(prepared, notify=notify, note=note)


def prepare(
    request: ConversionRequest,
    *,
    adopted: ConversionPlan | None = None,
    notify: Notify,
    warn: Note,
    note: Note,
) -> Prepared:
    """Decide everything that does not depend on the network's values.

    For a network that is converted already, the decision is about larger windows.

    Args:
        request: The request.
        adopted: The plan of `request.plan_folder`, which was made for the same network.
        notify: Called with the step that begins.
        warn: Called with a sentence on options without effect, or on unknown properties of the
            network.
        note: Called with other messages for the user.

    Raises:
        DclsConvertError: Something does not fit.
    """
    model = request.network.model
    if is_converted(model):
        larger = plan_larger_windows(request, model)
        return Prepared(request=request, draft=larger, start_name=FROM_CONVERTED, network=None)
    for sentence in options_without_effect(request):
        warn(sentence)
    network, weights = open_network(
        request.network, offline=request.dry_run, notify=notify, note=note
    )
    check_elements(request, weights, note)
    draft: DraftPlan
    if adopted is not None:
        draft = adopted_plan(adopted, network.examined, network.source)
    else:
        notify("finding convolutions")
        convs = examine(network, request.network)
        notify("planning")
        draft = draft_for_request(
            request.network, request.resolved_options, convs, network.source, weights
        )
    for caution in cautions(draft):
        warn(caution)
    elements = translated_elements(weights, draft, network.examined, request.start.authors_version)
    if request.dry_run and weights is not None:  # without a dry run, loading checks the weights
        lacking = names_lacking(weights, draft)
        check_weights(network.examined, weights.entries, weights.where, optional=lacking)
    return Prepared(
        request=request,
        draft=draft,
        start_name=request.resolved_init if elements is None else FROM_ELEMENTS,
        network=network,
        is_adopted=adopted is not None,
        weights=weights,
        elements=elements,
    )


def finish_(prepared: Prepared, *, notify: Notify, note: Note) -> Conversion:
    """Give the network its values, and carry out the draft.

    Args:
        prepared: The conversion, which can be finished once. A network in memory changes in place;
            after an error, it is as it was.
        notify: Called with the step that begins.
        note: Called with other messages for the user.

    Raises:
        DclsConvertError: Weights or images do not fit.
    """
    request = prepared.request
    draft = prepared.draft
    model = request.network.model
    if prepared.network is None:
        assert isinstance(model, nn.Module)
        assert isinstance(draft, ConversionPlan)
        report = enlarge_windows_(request, model, draft)
        return Conversion(
            request=request, start_name=prepared.start_name, report=report, model=model
        )
    with _unchanged_on_failure(request.network):
        model = give_values_(
            prepared.network,
            request.network,
            prepared.weights,
            lacking=names_lacking(prepared.weights, draft),
            notify=notify,
        )
        prepared.weights = None  # keeping both would take twice the memory
        images = _read_images(request, model, draft, note)
        statistics = None
        if images is not None:
            statistics = measure_inputs(model, find_groups(model, draft), images, notify)
        chosen = None
        if not prepared.is_adopted and request.counts_follow_errors:
            groups = find_groups(model, draft)
            chosen = choose_counts_by_error(draft, groups, statistics, notify)
        report = _replace_and_compare_(
            request,
            model,
            draft.with_counts(chosen),
            images,
            statistics=statistics,
            elements=prepared.elements,
            notify=notify,
        )
        attach_provenance_(model, describe_conversion(request))
        if images is not None:
            _state_normalisation_(model, request, report.plan)
    return Conversion(request=request, start_name=prepared.start_name, report=report, model=model)


def _unchanged_on_failure(request: NetworkRequest) -> AbstractContextManager[None]:
    """Restore a network in memory if the block fails, with its values if weights are loaded."""
    model = request.model
    if not isinstance(model, nn.Module):
        return contextlib.nullcontext()  # the user does not have the network yet
    values = []
    if request.weights is not None:
        values = [*model.parameters(), *model.buffers()]
    return unchanged_on_failure(model, values=values)


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
    """Replace the network's convolutions, and compare the outputs of a trained network.

    Args:
        images: The calibration's images. Outputs are compared on those that are held out.
        statistics: Statistics of the convolutions' inputs for these images.
        elements: See `replace_convs_`.
    """
    notify("converting")
    before = None
    if elements is None and request.network.trained and request.resolved_init != "random":
        before = outputs_before_conversion(network, images)
    plan = replace_convs_(
        network,
        plan,
        init=request.resolved_init,
        positions=request.start.positions,
        generator=torch.Generator().manual_seed(request.network.seed),
        statistics=statistics,
        elements=elements,
        notify=notify,
    )
    outcome = None
    if before is not None:
        outcome = compare_with_outputs_before(before, network, plan, images)
    return report_of(plan, outcome)


def _state_normalisation_(
    network: nn.Module, request: ConversionRequest, plan: ConversionPlan
) -> None:
    """Write the normalisation that the user stated for images into the network's own config."""
    start = request.start
    if start.mean is None or start.std is None or plan.input_size is None:
        return
    set_normalisation_(network, start.mean, start.std, channels=plan.input_size[0])
