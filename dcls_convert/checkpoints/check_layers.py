"""Compare the layers of a converted model with its plan, before anything is written.

A layer may have been changed since. What its plan does not state could not be loaded, or would load
as another network.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import CheckpointError
from ..layers.conv_settings import own_settings
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..networks.wrappers import by_plain_name
from ..placing.place import describe_difference
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..text import short_list
from ..weights.added_names import describe_added_names

# What a layer states besides its settings as a convolution.
DCLS_ATTRIBUTES = ("dilated_kernel_size", "kernel_count", "interpolation", "dense_axes", "grow")
PADDED_ATTRIBUTES = ("widths", "zeros", "pad_mode")  # see `layers/padded_conv.py`
EARLIER = (
    "make this change before convert_; or undo it, and make it again in what load_converted returns"
)
WITHOUT = (
    "give the network that was converted; or give plan.without('{}'), and load it into a network "
    "with the same change"
)
FOLD_ALL = (
    "fold all layers by fold_to_dense_(model), and give dataclasses.replace(plan, folded=True)"
)


class NotAsPlannedError(CheckpointError):
    """A layer is not as planned."""

    def __init__(self, name: str, found: str, cure: str = EARLIER) -> None:
        super().__init__(f"the model does not fit its plan: {name}: {found}. To save it, {cure}")


def check_layers(model: nn.Module, plan: ConversionPlan) -> None:
    """Refuse a model whose layers are not the plan's.

    Raises:
        CheckpointError: A layer is missing, unknown, or not as planned. The message says what to
            do.
    """
    modules = by_plain_name(model.named_modules(remove_duplicate=False))
    for layer in plan.layers:
        module = _find_layer(modules, layer)
        if plan.folded:
            _check_folded(module, layer)
        else:
            _check_layer(module, layer)
    planned = {modules[layer.name] for layer in plan.layers}
    for name, module in modules.items():
        if isinstance(module, DclsConvNd) and module not in planned:
            raise NotAsPlannedError(name, "the plan has no such layer")
    if not plan.folded:
        for layer in plan.layers:
            _check_tie(modules, layer)


def describe_hooks(model: nn.Module, plan: ConversionPlan) -> Iterator[str]:
    """Say which layers have hooks, which a folder does not hold; nothing if no layer has some."""
    modules = by_plain_name(model.named_modules())
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


def _find_layer(modules: Mapping[str, nn.Module], layer: LayerPlan) -> Any:
    """Return a layer of the plan, which must be in all its places, and in no others."""
    module = modules.get(layer.name)
    if module is None:
        cure = WITHOUT.format(layer.name)
        raise NotAsPlannedError(layer.name, "the model has no such layer", cure)
    names = [name for name, other in modules.items() if other is module]
    if set(names) != set(layer.names):
        found = f"one module is {short_list(names)}, in the plan only {short_list(layer.names)}"
        raise NotAsPlannedError(layer.name, found)
    return module


def _check_layer(module: Any, layer: LayerPlan) -> None:
    """Refuse a module that is not the DCLS layer of its plan."""
    expected = _make_on_meta(layer)
    if not isinstance(module, DclsConvNd):
        cure = EARLIER
        if isinstance(module, expected.conv_class):
            cure = WITHOUT.format(layer.name)
            if tuple(module.weight.shape[2:]) == layer.dilated_size:
                cure = FOLD_ALL
        raise NotAsPlannedError(layer.name, f"is of class {type(module).__name__}", cure)
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # which accelerate sets
        raise NotAsPlannedError(layer.name, "has a forward of its own, set on this very object")
    _check_attributes(module, expected, layer, DCLS_ATTRIBUTES)
    _check_tensors(module, expected, layer)
    if type(module) is not type(expected):
        raise NotAsPlannedError(layer.name, f"is of class {type(module).__name__}")


def _check_folded(module: Any, layer: LayerPlan) -> None:
    """Refuse a module that is not the plain convolution of a layer's plan."""
    if isinstance(module, DclsConvNd):
        unfolded = "give dataclasses.replace(plan, folded=False)"
        raise NotAsPlannedError(layer.name, f"is of class {type(module).__name__}", unfolded)
    expected = _make_on_meta(layer).plain_conv_without_values()
    if layer.stride and type(module) is not type(expected):
        raise NotAsPlannedError(layer.name, f"is of class {type(module).__name__}")
    _check_attributes(module, expected, layer, PADDED_ATTRIBUTES)


def _make_on_meta(layer: LayerPlan) -> DclsConvNd:
    """Make the layer that a plan describes, on the meta device, without bias."""
    dims = layer.dims
    if not layer.stride:  # not stated, see `LayerPlan`
        layer = replace(layer, stride=(1,) * dims, padding=(0,) * dims, padding_mode="zeros")
    return DCLS_LAYERS[dims].on_meta(
        layer,
        layer.kernel_count,
        layer.dilated_size,
        layer.interpolation,
        layer.dense_axes,
        layer.grow,
    )


def _check_attributes(
    module: Any, expected: Any, layer: LayerPlan, others: Collection[str]
) -> None:
    """Refuse a module whose settings, or other attributes, are not those expected."""
    settings = replace(own_settings(expected), bias=layer.bias)
    if not layer.stride:
        settings = replace(settings, stride=(), padding=(), padding_mode="")
        others = set(others).difference(PADDED_ATTRIBUTES)
    for name in others:
        found = getattr(module, name, None)
        planned = getattr(expected, name, None)
        if found != planned:
            text = f"{name} is {found!r}, the plan has {planned!r}"
            raise NotAsPlannedError(layer.name, text, f"give the model's own plan; or {EARLIER}")
    difference = describe_difference(own_settings(module), settings)
    if difference is not None:
        raise NotAsPlannedError(layer.name, difference)


def _check_tensors(module: Any, expected: DclsConvNd, layer: LayerPlan) -> None:
    """Refuse a layer that has other tensors than planned, such as masks, or other shapes."""
    names = {"weight", *module.traits.parameters}
    if layer.bias:
        names.add("bias")
    if not module.is_tied:
        names.update(layer.position_kinds)
    found = module.state_dict(keep_vars=True).keys()
    if found != names:
        parts = []
        for verb, some in (("has", found - names), ("lacks", names - found)):
            if some:
                parts.append(f"{verb} {short_list(sorted(some))}")
        cure = describe_added_names(found - names) or EARLIER
        raise NotAsPlannedError(layer.name, "; ".join(parts), cure)
    for name in ("weight", *layer.position_kinds):
        shape = tuple(getattr(module, name).shape)
        planned = tuple(getattr(expected, name).shape)
        if shape != planned:
            raise NotAsPlannedError(layer.name, f"has {name} of shape {shape}, not {planned}")


def _check_tie(modules: Mapping[str, Any], layer: LayerPlan) -> None:
    """Refuse a layer that does not read its positions where the plan says."""
    module = modules[layer.name]
    found = module.owner
    if found is modules[layer.owner or layer.name]:
        return
    names = [name for name, other in modules.items() if other is found]
    if layer.owner is not None:
        text = f"does not read its positions from {layer.owner}"
        cure = f"run model.get_submodule({layer.name!r}).tie_(model.get_submodule({layer.owner!r}))"
    elif names:
        text = f"reads positions of {names[0]}, and has its own in the plan"
        copied = f"copy.deepcopy(model.get_submodule({layer.name!r}))"
        cure = f"run model.set_submodule({layer.name!r}, {copied})"
    else:
        text = "reads positions of a layer that is no longer in the model"
        cure = "give copy.deepcopy(model)"
    raise NotAsPlannedError(layer.name, text, cure)
