"""Draft the plan for an open network, or check that the plan of a folder fits it."""

from dataclasses import replace

from torch import nn

from ..errors import PlanError
from ..geometry import size_text
from ..networks.find_convs import parameter_count
from ..networks.sites import ModelConvs
from ..networks.source import ModelSource, are_same_network
from ..networks.timm_notes import stated_source
from ..options import AUTO
from ..placing.place import find_planned_convs
from ..planning.plan import ConversionPlan, DraftPlan
from ..planning.plan_options import PlanOptions
from ..planning.planner import draft_plan
from ..running.input_spec import inputs_text
from ..text import shortened
from .authors import check_counts_of_elements, counts_of_elements
from .request import NetworkRequest, RequestWeights


def draft_for_request(
    request: NetworkRequest,
    options: PlanOptions,
    convs: ModelConvs,
    source: ModelSource | None,
    weights: RequestWeights | None = None,
) -> DraftPlan:
    """Decide everything except the counts that the budget or the layers' errors decide.

    Args:
        request: The network.
        options: What to plan.
        convs: The network's convolutions.
        source: The source that builds the network again; None if only the user's code can.
        weights: The weights that the request states.

    Raises:
        DclsConvertError: The options do not fit the network, its weights or its input size.
    """
    if weights is not None and weights.elements:
        # A stated count equals the elements' count: `check_elements`. Layers may differ in counts.
        options = replace(options, kernel_count=AUTO)
        draft = draft_plan(convs, options, source, known_counts=counts_of_elements(weights))
        check_counts_of_elements(draft, weights)
    else:
        draft = draft_plan(convs, options, source)
    states_inputs = request.input_size is not None or request.example_inputs is not None
    if draft.macs is None and states_inputs:
        _refuse_inputs(draft)
    return draft


def adopted_plan(
    plan: ConversionPlan, model: nn.Module, source: ModelSource | None
) -> ConversionPlan:
    """Return the plan of a folder, if it fits this network.

    Raises:
        PlanError: The network differs from the planned one; the message names the first difference.
    """
    # A plan of a network in memory states all arguments, even default values.
    is_same = are_same_network(plan.source, source)
    if not is_same and plan.source != stated_source(model):
        raise PlanError(f"the plan is for {_described(plan.source)}, not for {_described(source)}")
    find_planned_convs(model, plan)  # may raise
    params = parameter_count(model)
    if params != plan.params:
        raise PlanError(
            f"the plan is for a model of {plan.params:,} parameters, this one has {params:,}"
        )
    plan = replace(plan, folded=False)  # even the plan of a folded network gives DCLS layers
    if source is not None and (is_same or plan.source is None):
        # The plan of a network in memory has no name. The arguments of `source` decide the
        # preprocessing, which belongs to the weights.
        plan = replace(plan, model=source.name, model_args=source.args)
    return plan


def cautions(draft: DraftPlan) -> list[str]:
    """Return sentences on unknown properties of the network, with the possible consequences."""
    found = []
    if draft.not_measured is not None:
        found.append(
            f"what the network does with its convolutions was not measured: {draft.not_measured}. "
            "Other code may use them, and larger windows may look ahead in a causal network"
        )
    for overruled in draft.overruled:
        found.append(f"by a rule, windows grow where outputs did not look: {overruled}")
    if draft.macs is not None and draft.macs_note is not None:
        found.append(
            f"the MACs are too low: {draft.macs_note}. Sizes that depend on them may differ"
        )
    return found


def _described(source: ModelSource | None) -> str:
    if source is None:
        return "a model that only its user can build"
    described = shortened(source.name)
    if not source.args:
        return described
    stated = ", ".join(f"{key}={value!r}" for key, value in source.args.items())
    return f"{described} with {shortened(stated)}"


def _refuse_inputs(draft: DraftPlan) -> None:
    """Refuse (PlanError) stated inputs on which the network does not run."""
    assert draft.inputs is not None
    subject = f"example inputs {inputs_text(draft.inputs)}"
    if draft.input_size is not None:
        subject = f"input size {size_text(draft.input_size)}, as (channels, *spatial)"
    raise PlanError(f"{subject}: {draft.macs_note}")
