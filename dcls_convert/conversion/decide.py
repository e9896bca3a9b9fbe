"""Decide what a request leaves open ("auto"), and plan the conversion of a loaded network.

Each "auto" is decided in one place: the start in `request.py`, the rules in `planning/claims.py`,
windows in `planning/windows.py`, counts in `planning/budget.py`, the scope and known counts here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, PlanError
from ..geometry import size_text
from ..networks.input_tensors import inputs_text
from ..options import AUTO, ERROR_SCOPE, EXACT
from ..placing.groups import find_planned_convs
from ..planning.known_counts import LayerCounts
from ..planning.plan import ConversionPlan
from ..planning.plan_options import PlanOptions
from ..planning.planner import make_plan
from ..progress import Note, logger
from ..text import short_list, shortened
from .authors import RELEASED_VERSION, AuthorsWeights, translate_authors_elements
from .load import LoadedNetwork, RequestWeights
from .request import ConversionRequest, options_that_decide_counts


def decide_options(
    request: ConversionRequest, options: PlanOptions, weights: RequestWeights | None
) -> PlanOptions:
    """Return planning options in which the scope is decided, and the counts where they are known.

    If the scope is "error" and the counts are "auto", the network has to be measured.

    Args:
        request: The request, for its start and its images.
        options: The request's own options, or those of a row of a sweep.
        weights: The request's weights.

    Raises:
        CheckpointError: The weights have elements of their own, but options state others.
    """
    if weights is not None and weights.authors is not None:
        _refuse_stated_counts(options, weights.authors)
        return replace(options, kernel_count=AUTO)  # the weights have the counts
    if request.init == EXACT:
        return replace(options, kernel_count=EXACT)
    if options.scope != AUTO:
        return options
    if request.calibration is not None and options.kernel_count == AUTO:
        return replace(options, scope=ERROR_SCOPE)
    return replace(options, scope="model")


def plan_network(
    loaded: LoadedNetwork, weights: RequestWeights | None, options: PlanOptions
) -> ConversionPlan:
    """Decide what the options leave open, and make the plan; nothing is measured.

    Raises:
        DclsConvertError: The options do not fit the network, its weights or its input size.
    """
    return make_checked_plan(loaded, weights, decide_options(loaded.request, options, weights))


def make_checked_plan(
    loaded: LoadedNetwork,
    weights: RequestWeights | None,
    options: PlanOptions,
    *,
    measured_counts: LayerCounts | None = None,
) -> ConversionPlan:
    """Make the plan for decided options, with measured counts or those of the weights, if any.

    Raises:
        DclsConvertError: The options do not fit the network, its weights or its input size.
    """
    request = loaded.request
    known_counts = measured_counts
    if weights is not None and weights.authors is not None:
        known_counts = weights.authors.kernel_counts
    plan = make_plan(
        loaded.convs,
        options,
        known_counts=known_counts,
        model=loaded.model_name,
        model_args=loaded.model_args or None,
    )
    if weights is not None and weights.authors is not None:
        translate_authors_elements(weights.authors, plan, request.authors_version)  # may raise
    elif weights is not None and request.dry_run:
        weights.check(loaded.structure)  # the network is not built, which would check them
    has_lazy = any(map(is_lazy, loaded.structure.parameters()))  # which cannot run yet
    if plan.macs is None and request.states_inputs and not has_lazy:
        _check_inputs(plan)
    _log(request, plan)
    return plan


def check_stored_plan(loaded: LoadedNetwork, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan of another checkpoint, if it fits this network.

    Raises:
        PlanError: The network differs from the planned one; the message names the first difference.
    """
    planned = (plan.model, plan.model_args)
    found = (loaded.model_name, loaded.model_args)
    if planned != found:
        raise PlanError(f"the plan is for {_described(*planned)}, not for {_described(*found)}")
    find_planned_convs(loaded.structure, plan)  # may raise
    params = sum(parameter.numel() for parameter in loaded.structure.parameters())
    if params != plan.params:
        raise PlanError(
            f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}"
        )
    return replace(plan, folded=False)  # the plan of a folded checkpoint makes DCLS layers again


def _described(name: str | None, arguments: Mapping[str, Any]) -> str:
    described = shortened(name or "a model that only its user can build")
    if not arguments:
        return described
    stated = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{described} with {shortened(stated)}"


def check_start(request: ConversionRequest, weights: RequestWeights | None, note: Note) -> None:
    """Refuse options about the start that contradict the weights.

    Raises:
        CheckpointError: Elements of the authors' layers need no start, or are asked for where there
            are none.
    """
    if weights is None:
        return
    if weights.authors is None:
        if request.needs_authors_elements:
            raise CheckpointError(
                f"{weights.where}: has no layers of the authors' package "
                "(no layer has a P beside its weight)"
            )
        if request.authors_version is not None:
            raise CheckpointError(
                f"{weights.where}: has no layers of the authors' package; omit their version"
            )
        return
    contradicting = {
        f"init {request.init!r}": request.init != AUTO,
        "calibration": request.calibration is not None,
    }
    for option, is_stated in contradicting.items():
        if is_stated:
            raise CheckpointError(
                f"{weights.where}: has elements of its own, with positions; omit {option}"
            )
    if not weights.authors.has_sigma and request.authors_version is None:
        note(
            f"{weights.where} is assumed to have version {RELEASED_VERSION} of the authors' "
            "layers; if that is wrong, state the authors' version"
        )


def _refuse_stated_counts(options: PlanOptions, authors: AuthorsWeights) -> None:
    """Refuse options that decide kernel counts, unless they state the count of all layers."""
    stated = options_that_decide_counts(options)
    counts = set(authors.kernel_counts.counts.values())
    if not stated or (stated == ["kernel count"] and counts == {options.kernel_count}):
        return
    raise CheckpointError(
        f"{authors.where}: has elements of its own, {short_list(sorted(counts))} in a kernel; "
        f"omit {' and '.join(stated)}"
    )


def _check_inputs(plan: ConversionPlan) -> None:
    """Refuse (PlanError) stated inputs on which the network does not run."""
    assert plan.inputs is not None
    subject = f"example inputs {inputs_text(plan.inputs)}"
    if plan.input_size is not None:
        subject = f"input size {size_text(plan.input_size)}, as (channels, *spatial)"
    raise PlanError(f"{subject}: {plan.macs_note}")


def _log(request: ConversionRequest, plan: ConversionPlan) -> None:
    """Log at DEBUG how layers start, and the plan of each convolution."""
    logger.debug("start: %s; scope of the counts: %s", request.start, plan.scope)
    for layer in plan.layers:
        logger.debug(
            "%s: rule %r; kernel %s, window %s; %d elements, %s; positions of %s",
            layer.name,
            layer.rule,
            size_text(layer.kernel_size),
            size_text(layer.dilated_size),
            layer.kernel_count,
            layer.interpolation,
            layer.tie_group or layer.name,
        )
    for skipped in plan.skipped:
        logger.debug("%s: not converted: %s", skipped.name, skipped.reason)
