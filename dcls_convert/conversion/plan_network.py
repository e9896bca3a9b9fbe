"""Plan the conversion of a loaded network, or check that the plan of a folder fits it.

Three places resolve "auto": this module for the scope (and the counts, if the weights already have
elements), `request.py` for the start, and `planning/` for rules, windows and counts.
"""

from dataclasses import replace

from ..errors import PlanError
from ..geometry import size_text
from ..networks.find_convs import parameter_count
from ..networks.source import ModelSource
from ..networks.timm_notes import stated_source
from ..options import AUTO, ERROR_SCOPE, EXACT
from ..placing.place import find_planned_convs
from ..planning.kernel_counts import LayerCounts
from ..planning.plan import ConversionPlan
from ..planning.plan_options import PlanOptions
from ..planning.planner import make_plan
from ..running.input_spec import inputs_text
from ..text import shortened
from ..weights.loading import check_weights
from .authors import counts_of_elements, translate_authors_elements
from .open_network import LoadedNetwork


def are_counts_chosen_by_error(loaded: LoadedNetwork) -> bool:
    """True if counts are chosen by the error of each layer, which needs the network's kernels."""
    request = loaded.request
    if loaded.authors_weights is not None or request.init == EXACT:
        return False
    if request.options.kernel_count != AUTO:
        return False
    if request.options.scope == AUTO:
        return request.calibration is not None
    return request.options.scope == ERROR_SCOPE


def plan_network(
    loaded: LoadedNetwork, options: PlanOptions, counts_by_error: LayerCounts | None = None
) -> ConversionPlan:
    """Decide what the options leave open, and make the plan.

    Args:
        loaded: The network.
        options: The request's own options, or those of a row of a sweep.
        counts_by_error: Counts chosen by the error of each layer. Where they have still to be
            measured, the plan has those of the scope "model".

    Raises:
        DclsConvertError: The options do not fit the network, its weights or its input size.
    """
    request = loaded.request
    authors_weights = loaded.authors_weights
    known_counts = counts_by_error
    if authors_weights is not None:
        options = replace(options, kernel_count=AUTO)
        known_counts = counts_of_elements(authors_weights)
    elif request.init == EXACT:
        options = replace(options, kernel_count=EXACT)
    elif counts_by_error is not None:
        options = replace(options, scope=ERROR_SCOPE)
    elif options.kernel_count == AUTO:
        options = replace(options, scope="model")
    plan = make_plan(
        loaded.convs, options, known_counts=known_counts, source=loaded.source_in_folder
    )
    states_inputs = request.input_size is not None or request.example_inputs is not None
    if plan.macs is None and states_inputs:
        _refuse_inputs(plan)
    _check_weights(loaded, plan)
    return plan


def check_stored_plan(loaded: LoadedNetwork, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan of another folder, if it fits this network.

    Raises:
        PlanError: The network differs from the planned one; the message names the first difference.
    """
    found = loaded.source_in_folder
    # A plan of a network in memory states all arguments, also those that are the defaults.
    if plan.source not in (found, stated_source(loaded.structure)):
        raise PlanError(f"the plan is for {_described(plan.source)}, not for {_described(found)}")
    find_planned_convs(loaded.structure, plan)  # may raise
    params = parameter_count(loaded.structure)
    if params != plan.params:
        raise PlanError(
            f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}"
        )
    plan = replace(plan, folded=False)  # a folded plan makes DCLS layers again
    if plan.source is None and found is not None:  # of a network in memory; now the user names it
        plan = replace(plan, model=found.name, model_args=found.args)
    _check_weights(loaded, plan)
    return plan


def cautions(plan: ConversionPlan) -> list[str]:
    """Return sentences on what is not known of the network, and what this may mean."""
    found = []
    if plan.not_measured is not None:
        found.append(
            f"what the network does with its convolutions was not measured: {plan.not_measured}. "
            "Other code may use them, and larger windows may look ahead in a causal network"
        )
    for overruled in plan.overruled:
        found.append(f"by a rule, windows grow where outputs did not look: {overruled}")
    if plan.macs is not None and plan.macs_note is not None:
        found.append(
            f"the MACs are too low: {plan.macs_note}. Sizes that depend on them may differ"
        )
    return found


def _check_weights(loaded: LoadedNetwork, plan: ConversionPlan) -> None:
    """Refuse (CheckpointError) weights that do not fit, where loading would not find that out."""
    request = loaded.request
    weights = loaded.weights
    if weights is not None and weights.elements:
        translate_authors_elements(weights, plan, request.authors_version)  # may raise
    elif weights is not None and request.dry_run:
        check_weights(
            loaded.structure, weights.entries, weights.where, optional=weights.new_classifier
        )


def _described(source: ModelSource | None) -> str:
    if source is None:
        return "a model that only its user can build"
    described = shortened(source.name)
    if not source.args:
        return described
    stated = ", ".join(f"{key}={value!r}" for key, value in source.args.items())
    return f"{described} with {shortened(stated)}"


def _refuse_inputs(plan: ConversionPlan) -> None:
    """Refuse (PlanError) stated inputs on which the network does not run."""
    assert plan.inputs is not None
    subject = f"example inputs {inputs_text(plan.inputs)}"
    if plan.input_size is not None:
        subject = f"input size {size_text(plan.input_size)}, as (channels, *spatial)"
    raise PlanError(f"{subject}: {plan.macs_note}")
