"""Resolve a request: decide how layers start, choose the kernel counts, and make the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..conversion.authors import RELEASED_VERSION, AuthorsWeights, translate_authors_elements
from ..errors import CheckpointError, PlanError
from ..fitting.calibrate import CalibrationStatistics
from ..fitting.counts import choose_counts_by_error
from ..fitting.groups import make_layers
from ..fitting.warm_start import draw_fit_seed
from ..geometry import size_text
from ..networks.identify_model import INCEPTIONS, TRANSFORM_INPUT
from ..networks.running import eval_mode, run_batch, suppress_output
from ..options import AUTO, ERROR_SCOPE, EXACT, Init, PlanOptions, Scope
from ..planning.plan import ConversionPlan
from ..planning.planner import make_plan
from ..progress import logger
from ..text import one_line, short_list, shortened
from .loaded import LoadedNetwork
from .request import ConversionRequest, options_that_decide_counts


@dataclass(frozen=True, kw_only=True)
class ResolvedRequest:
    """A request, and the decisions on what it left open ("auto")."""

    request: ConversionRequest
    start: Init  # how new layers start, never "auto"; unused if there are `authors_weights`
    authors_weights: AuthorsWeights | None  # elements that the new layers take over
    plan: ConversionPlan
    # Statistics of the calibration, if it chose the counts. They hold for the loaded network only,
    # not for copies of it.
    statistics: CalibrationStatistics | None = None

    @property
    def keeps_outputs(self) -> bool:
        """Whether the start is meant to keep the outputs of a trained network."""
        return self.authors_weights is None and self.request.trained and self.start != "random"


def resolve(loaded: LoadedNetwork, options: PlanOptions | None = None) -> ResolvedRequest:
    """Decide everything that a request leaves open, and plan.

    Only the scope "error" builds the network with its weights, since it measures the kernels.

    Args:
        loaded: The request's network.
        options: Options to use instead of the request's.

    Raises:
        DclsConvertError: The network cannot be loaded, or the request does not fit it.
    """
    request = loaded.request
    if options is None:
        options = request.options
    authors_weights = _authors_weights(loaded)
    statistics = None
    if authors_weights is not None:
        _refuse_stated_counts(options, authors_weights, request.weights_name)
        options = replace(options, kernel_count=authors_weights.kernel_counts)
    elif request.init == EXACT:
        options = replace(options, kernel_count=EXACT)
    else:
        options = replace(options, scope=_resolved_scope(request, options))
        if options.scope == ERROR_SCOPE and options.kernel_count == AUTO:
            options, statistics = _with_counts_by_error(loaded, options)
    resolved = ResolvedRequest(
        request=request,
        start=request.start,
        authors_weights=authors_weights,
        plan=_checked_plan(loaded, options, authors_weights),
        statistics=statistics,
    )
    _log(resolved)
    return resolved


def resolve_with_plan(loaded: LoadedNetwork, plan: ConversionPlan) -> ResolvedRequest:
    """Resolve a request with a plan that was made for another checkpoint of the same network.

    Raises:
        PlanError: The network differs from the planned one; the message names the first difference.
        CheckpointError: The weights have elements, but the request states how layers start.
    """
    name, arguments = _name_and_arguments(loaded)
    planned_for = (plan.model, plan.model_args)
    if planned_for != (name, arguments):
        raise PlanError(
            f"the plan is for {_described(*planned_for)}, not for {_described(name, arguments)}"
        )
    make_layers(loaded.structure, plan)  # raises if the layers are not those of the plan
    params = sum(parameter.numel() for parameter in loaded.structure.parameters())
    if params != plan.params:
        raise PlanError(
            f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}"
        )
    return ResolvedRequest(
        request=loaded.request,
        start=loaded.request.start,
        authors_weights=_authors_weights(loaded),
        plan=replace(plan, folded=False),  # the plan of a folded checkpoint makes DCLS layers again
    )


def _name_and_arguments(loaded: LoadedNetwork) -> tuple[str | None, dict[str, Any]]:
    source = loaded.rebuildable_source
    if source is None:
        return None, {}
    arguments = source.args
    if loaded.request.pretrained and source.name in INCEPTIONS:
        arguments = {**arguments, TRANSFORM_INPUT: True}
    return source.name, arguments


def _described(name: str | None, arguments: Mapping[str, Any]) -> str:
    described = shortened(name or "a model that only its user can build")
    if not arguments:
        return described
    stated = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{described} with {shortened(stated)}"


def _authors_weights(loaded: LoadedNetwork) -> AuthorsWeights | None:
    """Return the loaded elements. Raise if they leave a stated option without effect."""
    request = loaded.request
    authors_weights = loaded.authors_weights
    if authors_weights is None:
        if request.authors_version is not None:
            raise CheckpointError(
                f"{request.weights_name}: has no layers of the authors' package; omit their version"
            )
        return None
    if request.init != AUTO:
        raise _option_without_effect(request, f"init {request.init!r}")
    if request.positions != "normal":
        raise _option_without_effect(request, f"positions {request.positions!r}")
    if request.calibration is not None:
        raise _option_without_effect(request, "calibration")
    if not authors_weights.has_sigma and request.authors_version is None:
        loaded.note(
            f"{request.weights_name} is assumed to have version {RELEASED_VERSION} of the authors' "
            "layers; if that is wrong, state the authors' version"
        )
    return authors_weights


def _option_without_effect(request: ConversionRequest, option: str) -> CheckpointError:
    return CheckpointError(
        f"{request.weights_name}: has elements of its own, with positions; omit {option}"
    )


def _refuse_stated_counts(
    options: PlanOptions, authors_weights: AuthorsWeights, weights_name: str
) -> None:
    """Refuse options that decide kernel counts, unless they state the count of all layers."""
    stated = options_that_decide_counts(options)
    counts = set(authors_weights.kernel_counts.counts.values())
    if not stated or (stated == ["kernel count"] and counts == {options.kernel_count}):
        return
    raise CheckpointError(
        f"{weights_name}: has elements of its own, {short_list(sorted(counts))} in a kernel; "
        f"omit {' and '.join(stated)}"
    )


def _resolved_scope(request: ConversionRequest, options: PlanOptions) -> Scope:
    """Return the scope; "auto" becomes "error" if images choose the counts, else "model"."""
    if options.scope != AUTO:
        return options.scope
    if request.calibration is not None and options.kernel_count == AUTO:
        return ERROR_SCOPE
    return "model"


def _with_counts_by_error(
    loaded: LoadedNetwork, options: PlanOptions
) -> tuple[PlanOptions, CalibrationStatistics | None]:
    """Choose kernel counts by the error of each layer.

    Return the options with these counts, and the statistics of the calibration if there is one.
    """
    plan = make_plan(loaded.convs, replace(options, scope="model"))
    seed = draw_fit_seed(torch.Generator().manual_seed(loaded.request.seed))
    counts, statistics = choose_counts_by_error(
        loaded.network,
        loaded.convs,
        options,
        seed=seed,
        calibration=loaded.calibration(plan),
        notify=loaded.notify,
    )
    return replace(options, kernel_count=counts), statistics


def _checked_plan(
    loaded: LoadedNetwork, options: PlanOptions, authors_weights: AuthorsWeights | None
) -> ConversionPlan:
    """Make the plan. Raise if it does not fit the network, its weights or its input size."""
    request = loaded.request
    name, arguments = _name_and_arguments(loaded)
    plan = make_plan(loaded.convs, options, model=name, model_args=arguments or None)
    if authors_weights is not None:
        # Raises if the elements do not fit the plan.
        translate_authors_elements(authors_weights, plan, request.authors_version)
    elif request.offline and request.weights is not None:
        # The network is not built, so weights that do not fit must be refused here.
        loaded.check_weights()
    if plan.macs is None and request.input_size is not None:
        _check_input_size(loaded, plan)
    return plan


def _check_input_size(loaded: LoadedNetwork, plan: ConversionPlan) -> None:
    """Refuse (PlanError) an input size at which the network does not run.

    Called after tracing on the meta device failed. A network in memory is then run with real
    values; if that works, the size is accepted and the MACs stay unknown.
    """
    assert plan.input_size is not None
    if isinstance(loaded.request.model, str):
        raise PlanError(f"input size {size_text(plan.input_size)}: {plan.macs_note}")
    network = loaded.network
    try:
        with eval_mode(network), suppress_output():
            run_batch(network, torch.zeros(1, *plan.input_size))
    except Exception as error:  # the user's own code runs here
        raise PlanError(
            f"input size {size_text(plan.input_size)}, as (channels, *spatial): "
            f"the model does not run at it: {one_line(error)[:200]}"
        ) from error


def _log(resolved: ResolvedRequest) -> None:
    """Log at DEBUG what was decided: how layers start, and the plan of each convolution."""
    plan = resolved.plan
    start: str = resolved.start
    if resolved.authors_weights is not None:
        start = "elements of the authors' package"
    logger.debug("start: %s; scope of the counts: %s", start, plan.scope)
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
