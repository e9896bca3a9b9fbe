"""Update a plan so that it rebuilds the model in its present state."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import DclsConvertError
from ..layers.dcls_conv import DclsConvNd
from ..networks.building import build_model
from ..networks.find_convs import find_convs_for, parameter_count
from ..networks.source import ModelSource
from ..networks.timm_notes import config_of, stated_args
from ..networks.wrappers import by_plain_name
from ..planning.plan import ConversionPlan
from ..reports.report import predict_report
from ..weights.loading import differing_num_classes


def with_current_args(
    plan: ConversionPlan, model: nn.Module, state: Mapping[str, Tensor]
) -> ConversionPlan:
    """Return the plan with the arguments that build the network in its present state.

    Classes, input channels and pooling may have changed: by timm's `reset_classifier`, by
    `timm.create_model("local-dir:FOLDER", num_classes=10, in_chans=1)`, or by a new layer in place
    of the classifier or the first convolution.
    """
    source = plan.source
    if source is None or not source.is_from_registry:
        return plan
    network = build_model(source, device="meta")
    args = dict(plan.model_args)
    if source.prefix == "timm":
        args |= _changed_args(network, model)
        channels = _differing_channels(network, state)
        if channels is not None:
            args["in_chans"] = channels
    classes = differing_num_classes(network, state)
    if classes is not None:
        args["num_classes"] = classes
    if args == plan.model_args:
        return plan
    try:
        return plan_for_source(ModelSource(name=source.name, args=args), plan)
    except DclsConvertError:
        # Keep the plan if the library builds no such network: loading back says what differs.
        return plan


def _changed_args(network: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return the arguments whose values differ between a model and its plan's network."""
    own = stated_args(network)
    changed = {}
    for name, value in stated_args(model).items():
        if own.get(name) != value:
            changed[name] = value
    return changed


def _differing_channels(network: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """Return the input channels of the first convolution if its shape differs from timm's."""
    first = f"{(config_of(network) or {}).get('first_conv')}.weight"
    own = network.state_dict()
    if first not in own or first not in state or own[first].shape == state[first].shape:
        return None
    return state[first].shape[1]


def with_current_interpolations(plan: ConversionPlan, model: nn.Module) -> ConversionPlan:
    """Return the plan with the interpolations of the layers, which `round_positions_` changes."""
    modules = by_plain_name(model.named_modules(remove_duplicate=False))
    layers = []
    for layer in plan.layers:
        module = modules.get(layer.name)
        if isinstance(module, DclsConvNd):
            layer = replace(layer, interpolation=module.interpolation)
        layers.append(layer)
    return plan if tuple(layers) == plan.layers else plan.with_layers(layers)


def plan_for_source(source: ModelSource, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan for the network that a source builds, with its parameters and MACs."""
    input_size = plan.input_size
    if input_size is not None and "in_chans" in source.args:
        input_size = (source.args["in_chans"], *input_size[1:])
    planned = replace(plan, model=source.name, model_args=source.args, input_size=input_size)
    if not source.is_from_registry:
        return planned
    convs = find_convs_for(build_model(source, device="meta"), planned.inputs)
    return replace(planned, params=convs.params, macs=convs.macs, macs_note=convs.macs_note)


def plan_for_features(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan with the names that the layers have in timm's feature extractor.

    An extractor has the network's layers in the same order, up to the last feature. For any other
    model, return the plan itself.
    """
    if plan.model_args.get("features_only") or not stated_args(model).get("features_only"):
        return plan
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DclsConvNd):
            names.setdefault(module, []).append(name)
    layers = []
    for layer, own_names in zip(plan.layers, names.values(), strict=False):
        layers.append(replace(layer, names=tuple(own_names)))
    return plan.with_layers(layers)


def plan_without_source(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan for a network that only its user can build.

    The model's parameters are counted. If their number differs from the plan's, MACs are unknown.
    """
    own = replace(plan, model=None, model_args={})
    added = predict_report(plan).params.delta or 0
    params = parameter_count(model) - added
    if params == plan.params:
        return own
    return replace(
        own,
        params=params,
        macs=None,
        macs_note="the network was changed after its conversion",
    )
