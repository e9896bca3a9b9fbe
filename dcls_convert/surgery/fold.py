"""Every DCLS layer becomes its plain convolution, by our own function or by timm's `reparameterize_model`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import fx, nn

from ..errors import PlanError
from ..layers.dcls_conv import DclsConvNd
from ..layers.ties import release_owner_, shared_parameter_names
from ..networks.positions import drop_spare_from_decay_
from ..networks.running import unchanged_on_failure

# Methods that timm's `reparameterize_model` looks for on a child, in this order; it calls the first one found.
REPARAMETERIZING = ("fuse", "reparameterize", "switch_to_deploy")


def fold_to_dense_(model: nn.Module) -> int:
    """Replace every DCLS layer by its plain convolution, drop the tied positions, and return how many there were.

    Outputs stay the same; each kernel is an ordinary dense one of the window's size. timm's savers (`save_for_hf`,
    `push_to_hf_hub`) then write a config that rebuilds the folded model. `timm.utils.reparameterize_model(model)` folds
    a converted model too, but starts at its children and leaves that config: fold with this function before saving.

    Raises:
        PlanError: The model is itself a DCLS layer.
    """
    if isinstance(model, DclsConvNd):
        raise PlanError("the model is itself a DCLS layer, which cannot be replaced in place; use its fuse()")
    layers = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, DclsConvNd)]
    folded = {layer: layer.fuse() for _, layer in layers}
    with unchanged_on_failure(model):
        for name, layer in layers:
            model.set_submodule(name, folded[layer])
        for layer in folded:  # tied parameters go from their owner once no layer below it uses them
            if (owner := layer._owner) is not None:
                in_use = shared_parameter_names(owner)
                for name in set(layer._owner_names.values()) - in_use:
                    owner._parameters.pop(name, None)
                if not in_use:
                    release_owner_(owner)
        for attributes in map(vars, model.modules()):
            for name in REPARAMETERIZING:
                if getattr(attributes.get(name), "func", None) is _fold_first:
                    del attributes[name]
        drop_spare_from_decay_(model)
        arguments = vars(model).get("_model_args")  # as `place` sets it, for timm's savers
        if isinstance(arguments, dict) and isinstance(arguments.get("plan"), dict):
            vars(model)["_model_args"] = {**arguments, "plan": {**arguments["plan"], "folded": True}}
    return len(folded)


def fold_before_timm_fuses_(model: nn.Module) -> None:
    """Let timm's `reparameterize_model` fold a converted model before it fuses other things in it."""
    # timm by itself leaves tied positions on their owner; RepViT and LeViT would take elements' weights for a kernel.
    for module in (model, *_children(model)):
        has_layers = any(isinstance(inner, DclsConvNd) for inner in module.modules())
        if has_layers and not isinstance(module, DclsConvNd | fx.GraphModule):
            name = next((name for name in REPARAMETERIZING if hasattr(module, name)), "reparameterize")
            vars(module)[name] = partial(_fold_first, module, name)


def _fold_first(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """In the place of a module's method: folds the module, then calls the method of this name that its class has."""
    fold_to_dense_(module)  # takes what calls this off the module as well
    own: Any = getattr(module, name, None)
    return None if own is None else own(*args, **kwargs)


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a model. Copies of a GraphModule lose attributes, so its own children stand for it."""
    for child in model.children():
        yield from _children(child) if isinstance(child, fx.GraphModule) else (child,)
