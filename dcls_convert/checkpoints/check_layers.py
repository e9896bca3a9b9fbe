"""Compare the layers of a converted model with its plan, before anything is written.

Layers may have been changed since the plan was made. A folder is loaded by its plan, so such a
change would be lost, or the folder could not be loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..geometry import on_every_axis
from ..layers.conv_classes import has_own_forward
from ..layers.conv_settings import own_settings
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..networks.wrappers import by_plain_name
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..text import short_list

# Attributes that a DCLS layer has besides the settings of a convolution.
DCLS_ATTRIBUTES = ("dilated_kernel_size", "kernel_count", "dense_axes", "grow")
Difference = tuple[str, str]  # what was found, and what to do to save the model

UNDO = (
    "undo this change, save, and make it again in what load_converted returns; "
    "or make it before convert_"
)
AS_MASKS_HAVE = (
    ", as masks and norms have (torch.nn.utils.prune.remove and remove_parametrizations undo them)"
)
WITHOUT = (
    "give the network that was converted; or give plan.without('{}'), and load it into a network "
    "with the same change"
)
OWN_PLAN = "give the model's own plan"
FOLD_ALL = (
    "fold all layers by fold_to_dense_(model), and give dataclasses.replace(plan, folded=True); or "
)


def check_layers(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a model whose layers differ from its plan.

    Raises:
        CheckpointError: A layer is missing, unknown, or not as planned. The message says what to
            do.
    """
    modules = by_plain_name(model.named_modules(remove_duplicate=False))
    for name, found, cure in _problems(modules, plan):
        raise CheckpointError(
            f"the model does not fit its plan: {name}: {found}. To save it, {cure}"
        )


def _problems(modules: Mapping[str, Any], plan: ConversionPlan) -> Iterator[tuple[str, str, str]]:
    """Yield the name of a layer, what was found, and what to do.

    Callers take only the first problem: each check assumes that all earlier checks passed.
    """
    for layer in plan.layers:
        if layer.name not in modules:
            cure = _cure_of_missing(modules, plan, layer.name)
            yield layer.name, "the model has no such layer", cure
        for found, cure in _differences(modules, layer):
            yield layer.name, found, cure
    name_of: dict[Tensor, str] = {}  # each parameter is loaded into one layer
    for layer in plan.layers:
        for attribute in ("weight", "positions"):
            parameter = modules[layer.name]._parameters.get(attribute)
            if parameter is not None and name_of.setdefault(parameter, layer.name) != layer.name:
                yield layer.name, f"shares its {attribute} with {name_of[parameter]}", UNDO
    planned = {modules[layer.name] for layer in plan.layers}
    for name, module in modules.items():
        if isinstance(module, DclsConvNd) and module not in planned:
            yield name, "the plan has no such layer", f"{OWN_PLAN}; or {UNDO}"


def _cure_of_missing(modules: Mapping[str, nn.Module], plan: ConversionPlan, name: str) -> str:
    """Say what to do about a missing layer: the converted network may be a part of the model."""
    for path in modules:
        if all(f"{path}.{layer.name}" in modules for layer in plan.layers):
            return f"give model.get_submodule({path!r})"
    return WITHOUT.format(name)


def _differences(modules: Mapping[str, Any], layer: LayerPlan) -> Iterator[Difference]:
    """Yield how a layer differs from its plan. Each check assumes that all earlier checks passed.

    If the plan is folded, the layer is a plain convolution.
    """
    module = modules[layer.name]
    names = [name for name, other in modules.items() if other is module]
    if set(names) != set(layer.names):
        yield f"one module is {short_list(names)}, in the plan {short_list(layer.names)}", UNDO
    expected: Any = _make_expected(layer)
    if type(module) is not type(expected):
        cure = UNDO
        if layer.folded and isinstance(module, DclsConvNd):
            cure = "give dataclasses.replace(plan, folded=False)"
        elif isinstance(module, DCLS_LAYERS[layer.dims].conv_class) and not layer.folded:
            cure = FOLD_ALL + WITHOUT.format(layer.name)
        yield f"is of class {type(module).__name__}", cure
    # Accept the forward that accelerate sets: it only moves tensors. Its mark is `_hf_hook`.
    if has_own_forward(module) and not hasattr(module, "_hf_hook"):
        yield "has a forward of its own, set on this very object", UNDO
    settings = own_settings(expected)
    if not layer.folded:
        yield from _tie_differences(modules, module, layer)
        for name in DCLS_ATTRIBUTES:
            found = getattr(module, name)
            planned = getattr(expected, name)
            if found != planned:
                text = f"{name} is {found!r}, the plan has {planned!r}"
                yield text, f"{OWN_PLAN}; or {UNDO}"
        settings = replace(settings, transform=layer.transform)
    if not layer.stride:  # plans of version 0.3.0 state none of these three
        settings = replace(settings, stride=(), padding=(), padding_mode="")
    difference = own_settings(module).describe_difference(settings)
    if difference is not None:
        yield difference, UNDO
    yield from _tensor_differences(module, expected)


def _make_expected(layer: LayerPlan) -> nn.Module:
    """Make the layer that a plan describes, on the meta device."""
    settings = layer
    if not layer.stride:
        ones = on_every_axis(1, layer.dims)
        settings = replace(layer, stride=ones, padding=ones, padding_mode="zeros")
    expected = DCLS_LAYERS[layer.dims].on_meta(
        settings,
        layer.kernel_count,
        layer.dilated_size,
        layer.interpolation,
        layer.dense_axes,
        layer.grow,
    )
    if layer.bias:
        expected.bias = nn.Parameter(torch.empty(layer.out_channels, device="meta"))
    return expected.plain_conv_without_values() if layer.folded else expected


def _tie_differences(
    modules: Mapping[str, Any], module: Any, layer: LayerPlan
) -> Iterator[Difference]:
    """Yield how the owner of a layer's positions differs from the plan."""
    owner = module.owner
    if owner is modules[layer.owner or layer.name]:
        if owner.interpolation != module.interpolation:
            text = f"is {module.interpolation}, and {layer.owner} is {owner.interpolation}"
            yield text, "round all positions by dcls_convert.tuning.round_positions_(model)"
    elif owner is module:
        text = f"has positions of its own, but in the plan it shares those of {layer.owner}"
        yield text, f"give plan.untied({layer.name!r})"
    elif owner in modules.values():
        yield "reads positions of another layer than in the plan", UNDO
    else:
        yield (
            "reads positions of a layer that is no longer in the model",
            "give copy.deepcopy(model)",
        )


def _tensor_differences(module: Any, expected: Any) -> Iterator[Difference]:
    """Yield tensors that are not in the plan, such as masks, missing tensors, and wrong shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    planned = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    if isinstance(module, DclsConvNd):
        for name in module.traits.parameters:
            planned[name] = shapes.get(name, ())
        if module.is_tied:
            planned.pop("positions")
            planned.pop("sigma", None)
    added = shapes.keys() - planned.keys()
    if added:
        yield f"has {short_list(sorted(added))}{AS_MASKS_HAVE}", UNDO
    for name, shape in planned.items():
        if name not in shapes:
            yield f"has no {name}", UNDO
        elif shapes[name] != shape:
            yield f"{name} has shape {shapes[name]}, the plan has {shape}", UNDO


def describe_hooks(model: nn.Module, plan: ConversionPlan) -> Iterator[str]:
    """Yield a note that names the layers with forward hooks, which a folder does not hold."""
    modules = by_plain_name(model.named_modules(remove_duplicate=False))
    hooked = []
    for layer in plan.layers:
        module = modules[layer.name]
        if module._forward_hooks or module._forward_pre_hooks:
            hooked.append(layer.name)
    if hooked:
        yield (
            f"a folder does not hold the forward hooks of {short_list(hooked)}: load it into a "
            "network with the same hooks"
        )
