"""Find out whether loading would rebuild a model from its plan, and by which plan it can be loaded.

Between its conversion and its saving, a model may get another head, activation or norm. So the
model of the plan is built, given the same tensors, and its outputs are compared, as are the classes
of its modules: where a layer scale, or a norm's zero, mutes a block, its outputs show no edit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError
from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DclsConvNd
from ..layers.state_dicts import settings_text
from ..networks.building import build_model
from ..networks.find_convs import find_convs_for
from ..networks.registries import REGISTRIES
from ..networks.source import ModelSource
from ..networks.wrappers import plain_name
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..reports.predict import predict_report
from ..weights.loading import (
    describe_misfits,
    differing_num_classes,
    holds_meta_tensors,
    load_entries_,
)
from .fingerprint import TOLERANCES, Fingerprint, fingerprint_deviation, take_fingerprint
from .load import place_stored_plan_
from .timm_model import flat_name, plan_for_features


@dataclass(frozen=True, kw_only=True, slots=True)
class Loadable:
    """How a model can be loaded once it is saved."""

    plan: ConversionPlan  # without `model` if only the user can build the network
    fingerprint: Fingerprint | None  # of the model's outputs; None if it was not run
    note: str | None  # what the user should know


def features_plan(model: nn.Module, plan: ConversionPlan) -> ConversionPlan | None:
    """Return the plan of timm's feature extractor of a network; None for the network itself.

    Its layers may have other names than the network's.
    """
    # A whole network of timm has a list as `feature_info`.
    indices = getattr(getattr(model, "feature_info", None), "out_indices", None)
    if indices is None or plan.model_args.get("features_only"):
        return None
    features = plan_for_features(model, plan)
    if not features.layers:
        return None
    args = {**plan.model_args, "features_only": True, "out_indices": list(indices)}
    try:
        unconverted = build_model(ModelSource(name=plan.model or "", args=args), device="meta")
        convs = find_convs_for(unconverted, plan.inputs)
    except DclsConvertError:
        return as_users_own(model, features)
    return replace(
        features,
        model_args=args,
        params=convs.params,
        macs=convs.macs,
        macs_note=convs.macs_note,
    )


def check_layers(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a model whose layers are not the plan's.

    Raises:
        CheckpointError: A layer is missing, or has another class, shape or tie.
    """
    if plan.folded:
        return
    problem = next(_layer_problems(model, plan), None)
    if problem is not None:
        raise CheckpointError(f"the model no longer fits its plan: {problem}")


def _layer_problems(model: nn.Module, plan: ConversionPlan) -> Iterator[str]:
    """Yield a message for each planned layer that is missing or another, or no longer tied."""
    modules = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[plain_name(name)] = module
    for layer in plan.layers:
        module = modules.get(layer.name)
        shape = layer.position_shape[1:]
        settings = settings_text(layer.dilated_size, layer.interpolation, layer.dense_axes)
        if module is None:
            yield f"{layer.name} is missing{_where_it_is(layer.name, modules)}"
        elif not isinstance(module, DclsConvNd):
            yield f"{layer.name} is a {type(module).__name__}, {_cure_of_other(module, layer)}"
        elif tuple(module.weight.shape) != shape:
            weight_shape = tuple(module.weight.shape)
            yield f"{layer.name}.weight has shape {weight_shape}, the plan has {shape}"
        elif module.settings != settings:
            yield f"{layer.name} has window {module.settings}; the plan has {settings}"
    for layer in plan.layers:
        owner = plan.owner_of(layer)
        if modules[owner.name].is_tied:
            yield (
                f"{owner.name} reads positions of a layer that is no longer in the model; "
                "copy.deepcopy(model) has them"
            )
        if modules[layer.name].positions is not modules[owner.name].positions:
            yield (
                f"{layer.name} does not read its positions from {owner.name}, as in the plan."
                f" To tie it again: model.get_submodule({layer.name!r}).tie_("
                f"model.get_submodule({owner.name!r}))"
            )


def _where_it_is(layer_name: str, modules: Mapping[str, nn.Module]) -> str:
    """Say which part of the model to save, if the layer is in it under its name."""
    for name in modules:
        if name.endswith(f".{layer_name}"):
            part = name.removesuffix(f".{layer_name}")
            return f"; the network seems to be inside: save its {part!r}"
    return ""


def _cure_of_other(module: nn.Module, layer: LayerPlan) -> str:
    """Say what to do if another module is in a layer's place."""
    if any(isinstance(inner, DclsConvNd) for inner in module.modules()):
        return "which wraps the layer; first merge or remove it, then save the network"
    reason = "not a layer with learnable positions"
    if not isinstance(module, AnyConv):
        return f"{reason}; plan.without(...) leaves it out"
    if module.kernel_size == layer.dilated_size:
        return f"{reason}; the plan of a folded model is dataclasses.replace(plan, folded=True)"
    return f"{reason}; apply_plan_(model, plan) makes it one"


def find_loadable_plan(
    model: nn.Module, state: Mapping[str, Tensor], plan: ConversionPlan, *, run: bool
) -> Loadable:
    """Find the plan by which a model can be loaded.

    It is the given plan if its network is the model, or the same plan with the model's numbers of
    classes and channels. Otherwise, it is a plan which says that only the user can build the
    network.

    Args:
        model: The converted model.
        state: Its state dict, with the model's very tensors.
        plan: The plan that was carried out.
        run: Whether the model may be run, to compare its outputs.
    """
    if _source_of(plan).kind not in REGISTRIES:
        fingerprint = take_fingerprint(model, plan.inputs) if run else None
        return Loadable(plan=plan, fingerprint=fingerprint, note=None)
    network = _build_on_meta(plan)
    first = _compare(network, model, state, plan, run=run)
    if first.difference is None:
        return _same_network(plan, first.fingerprint)
    adapted = _with_current_head(network, model, state, plan)
    if adapted is not None:
        network = _build_on_meta(adapted)
        second = _compare(network, model, state, adapted, run=run)
        if second.difference is None:
            return _same_network(adapted, second.fingerprint)
    note = (
        f"the model is no longer {plan.model} with its plan: {first.difference}. It is saved as "
        "your own: load it with load_converted(folder, model=...), given the unconverted network "
        "with the same changes"
    )
    fingerprint = first.fingerprint
    if run and fingerprint is None:
        fingerprint = take_fingerprint(model, plan.inputs)
    return Loadable(plan=as_users_own(model, plan), fingerprint=fingerprint, note=note)


def _source_of(plan: ConversionPlan) -> ModelSource:
    return ModelSource(name=plan.model or "", args=plan.model_args)


def _build_on_meta(plan: ConversionPlan) -> nn.Module:
    network = build_model(_source_of(plan), device="meta")
    place_stored_plan_(network, plan)
    return network


def _same_network(plan: ConversionPlan, fingerprint: Fingerprint | None) -> Loadable:
    """Return the plan, with a note if outputs should have been compared, but could not be."""
    note = None
    if fingerprint is not None and fingerprint.outputs is None:
        note = (
            f"whether the model is still {plan.model} with its plan was checked by names, shapes "
            f"and classes, not by its outputs: {fingerprint.reason}"
        )
    return Loadable(plan=plan, fingerprint=fingerprint, note=note)


def _describe_other_module(network: nn.Module, model: nn.Module) -> str | None:
    """Return the first module without children that computes something else; None if all agree."""
    modules = dict(network.named_modules())
    for name, module in model.named_modules():
        expected = modules.get(plain_name(name), module)
        # A wrapper of a part, for compilation or checkpointing, has children.
        has_children = bool(module._modules or expected._modules)
        if not has_children and _kind(module) != _kind(expected):
            return f"{name} is {_kind(module)} in place of {_kind(expected)}"
    return None


def _kind(module: nn.Module) -> str:
    """Return the class of a module, and its epsilon; "Identity" if it acts in training alone."""
    name = type(module).__name__
    if "Drop" in name or name == "StochasticDepth":
        return "Identity"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        name = "BatchNorm"
    eps = getattr(module, "eps", None)
    if eps is None:
        return name
    return f"{name}(eps={eps})"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """How a model differs from the network of a plan."""

    difference: str | None  # None if it does not differ
    fingerprint: Fingerprint | None  # of the model; None if it was not run


def _compare(
    network: nn.Module,
    model: nn.Module,
    state: Mapping[str, Tensor],
    plan: ConversionPlan,
    *,
    run: bool,
) -> _Comparison:
    """Compare a model with the network of a plan.

    Args:
        network: The plan's network on the meta device; gets the model's tensors.
        model: The model.
        state: Its state dict.
        plan: The plan.
        run: Whether to compare outputs too.
    """
    difference = next(describe_misfits(network, state), None)
    if difference is None:
        difference = _describe_other_module(network, model)
    else:
        difference = difference.removeprefix("does not fit the model; ")
    if difference is not None or not run:
        return _Comparison(difference=difference, fingerprint=None)
    fingerprint = take_fingerprint(model, plan.inputs)
    if fingerprint.outputs is None:
        return _Comparison(difference=None, fingerprint=fingerprint)
    rebuilt = take_fingerprint(_with_tensors_of(network, model, state, plan), plan.inputs)
    tolerance = TOLERANCES[fingerprint.dtype]
    deviation = fingerprint_deviation(rebuilt, fingerprint)
    if rebuilt.outputs is None:
        difference = f"rebuilt from its plan, it does not run ({rebuilt.reason})"
    elif not deviation <= tolerance:
        again = take_fingerprint(model, plan.inputs)
        if fingerprint_deviation(again, fingerprint) > tolerance:
            reason = "they are not the same for the same image"
            fingerprint = replace(fingerprint, outputs=None, reason=reason)
        else:
            difference = f"for one random image, its outputs differ{_by_percent(deviation)}"
    return _Comparison(difference=difference, fingerprint=fingerprint)


def _by_percent(deviation: float) -> str:
    """Return 0.0123 as " by 1.2 %" and 12.3 as " by 1,230 %"; nothing if it is infinite."""
    if math.isinf(deviation):
        return ""
    percent = 100 * deviation
    digits = 0 if percent >= 10 else 1
    return f" by {percent:,.{digits}f} %"


def _with_tensors_of(
    network: nn.Module, model: nn.Module, state: Mapping[str, Tensor], plan: ConversionPlan
) -> nn.Module:
    """Return the plan's network with the model's tensors, which are shared and not copied."""
    shared = {name: tensor.detach() for name, tensor in state.items()}
    load_entries_(network, shared, assign=True)
    if holds_meta_tensors(network):  # tables that its constructor computes and that are not stored
        network = build_model(_source_of(plan))
        place_stored_plan_(network, plan)
        load_entries_(network, shared, assign=True)
    own_buffers = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    for name, buffer in network.named_buffers():
        if name in own_buffers and name not in state:
            buffer.data = buffer.data.to(own_buffers[name])
    return network


def _with_current_head(
    network: nn.Module, model: nn.Module, state: Mapping[str, Tensor], plan: ConversionPlan
) -> ConversionPlan | None:
    """Return the plan for the classes and input channels that the model has now.

    Return None if they are the plan's, or if the library builds no such network. They change with
    `reset_classifier`, with a new layer in the head's place, and with
    `timm.create_model("local-dir:FOLDER", num_classes=10, in_chans=1)`.

    Args:
        network: The plan's network.
        model: The model.
        state: Its state dict.
        plan: The plan.
    """
    args = dict(plan.model_args)
    classes = differing_num_classes(network, state)
    if classes is None:
        classes = getattr(model, "num_classes", None)
    if classes is not None and classes != getattr(network, "num_classes", None):
        args["num_classes"] = classes
    input_size = plan.input_size
    if input_size is not None and _source_of(plan).kind == "timm":
        stored_channels, *sides = input_size
        channels = _input_channels(model, default=stored_channels)
        if channels != stored_channels:
            args["in_chans"] = channels
            input_size = (channels, *sides)
    if args == plan.model_args:
        return None
    adapted = replace(plan, model_args=args, input_size=input_size)
    try:
        unconverted = build_model(_source_of(adapted), device="meta")
        convs = find_convs_for(unconverted, adapted.inputs)
    except DclsConvertError:
        return None
    return replace(
        adapted,
        params=convs.params,
        macs=convs.macs,
        macs_note=convs.macs_note,
    )


def _input_channels(model: nn.Module, default: int) -> int:
    """Return the input channels of a timm model's first convolution, if timm names one."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    first_conv = cfg.get("first_conv")
    if not isinstance(first_conv, str):
        return default
    for name, module in model.named_modules():
        if flat_name(name) == flat_name(first_conv):  # an extractor has another name for it
            channels: int = getattr(module, "in_channels", default)
            return channels
    return default


def as_users_own(model: nn.Module, plan: ConversionPlan) -> ConversionPlan:
    """Return the plan for a network that only its user can build.

    Its parameters are counted. If their number differs from the plan's, its MACs are not known.
    """
    own = replace(plan, model=None, model_args={})
    added = predict_report(plan).params.delta or 0
    params = sum(parameter.numel() for parameter in model.parameters()) - added
    if params == plan.params:
        return own
    return replace(
        own,
        params=params,
        macs=None,
        macs_note="the network was changed after its conversion",
    )
