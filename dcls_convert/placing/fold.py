"""Fold: replace every DCLS layer by its plain convolution, which `DclsConvNd.fuse` makes.

A model is folded by `fold_to_dense_`, or by timm's `reparameterize_model`, which calls it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import fx, nn

from ..errors import PlanError, check_argument
from ..layers.dcls_conv import DclsConvNd
from ..networks.position_parameters import undo_exclusion_from_weight_decay_
from ..networks.running import unchanged_on_failure
from ..networks.wrappers import inside_wrappers
from .branches import REPARAMETERIZE_METHODS, keep_unmergeable_branches_


def fold_to_dense_(model: nn.Module) -> int:
    """Replace every DCLS layer by its plain convolution, and drop the tied positions.

    Outputs stay the same; each kernel becomes an ordinary dense kernel of the window's size. timm's
    savers (`save_for_hf`, `push_to_hf_hub`) then write a config that rebuilds the folded model.
    `timm.utils.reparameterize_model(model)` folds a converted model too, but starts at its children
    and does not change that config: fold with this function before saving.

    Args:
        model: Changed in place. May be wrapped (`torch.compile`, DataParallel, averaged copies).

    Returns:
        The number of layers that were folded.

    Raises:
        PlanError: The model is itself a DCLS layer, or a layer's forward was replaced. Nothing has
            changed then.
    """
    check_argument("model", model, nn.Module)
    model = inside_wrappers(model, replaces_parameters=True)
    if isinstance(model, DclsConvNd):
        raise PlanError(
            "the model is itself a DCLS layer, which cannot be replaced in place; use its fuse()"
        )
    layers: dict[str, DclsConvNd] = {}  # a layer with several names is listed under each
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DclsConvNd):
            _check_own_forward(name, module)
            layers[name] = module
    plain_conv_of = {layer: layer.fuse() for layer in layers.values()}
    with unchanged_on_failure(model):
        for name, layer in layers.items():
            model.set_submodule(name, plain_conv_of[layer])
        for layer in plain_conv_of:
            layer.release_tied_parameters_()
        _remove_timm_fold_hook_(model)
        undo_exclusion_from_weight_decay_(model)
        _mark_folded_for_timm_(model)
        keep_unmergeable_branches_(model, layers)
    return len(plain_conv_of)


def _check_own_forward(name: str, layer: DclsConvNd) -> None:
    """Refuse a layer whose forward was replaced: what it computes now is not known."""
    if "forward" in vars(layer):
        raise PlanError(
            f"{name} cannot be folded: it has a forward of its own, set on this very object, which "
            "a plain convolution would not compute; remove it first"
        )


def _mark_folded_for_timm_(model: nn.Module) -> None:
    """Mark the plan as folded in the arguments that `insert_layers_` left for timm's savers."""
    arguments = vars(model).get("_model_args")
    if isinstance(arguments, dict) and isinstance(arguments.get("plan"), dict):
        plan = {**arguments["plan"], "folded": True}
        vars(model)["_model_args"] = {**arguments, "plan": plan}


def install_timm_fold_hook_(model: nn.Module) -> None:
    """Let timm's `reparameterize_model` fold a converted model before it fuses anything else."""
    # Without this, timm leaves tied positions on their owner, and RepViT and LeViT would mistake
    # the weights of elements for a dense kernel.
    for module in (model, *_children(model)):
        has_layers = any(isinstance(inner, DclsConvNd) for inner in module.modules())
        if has_layers and not isinstance(module, DclsConvNd | fx.GraphModule):
            name = _method_that_timm_calls(module)
            vars(module)[name] = partial(_fold_first, module, name)


def _method_that_timm_calls(module: nn.Module) -> str:
    for name in REPARAMETERIZE_METHODS:
        if hasattr(module, name):
            return name
    return "reparameterize"


def _remove_timm_fold_hook_(model: nn.Module) -> None:
    """Undo `install_timm_fold_hook_`."""
    for module in model.modules():
        attributes = vars(module)
        for name in REPARAMETERIZE_METHODS:
            function = getattr(attributes.get(name), "func", None)
            if function is _fold_first:
                del attributes[name]


def _fold_first(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Fold the module, then call its own method `name`, which this function replaces.

    Return None if the module's class has no such method.
    """
    fold_to_dense_(module)  # also removes this function from the module
    method: Any = getattr(module, name, None)
    if method is None:
        return None
    return method(*args, **kwargs)


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a model; in place of a GraphModule, yield its own children.

    A copy of a GraphModule loses the attribute that `install_timm_fold_hook_` sets.
    """
    for child in model.children():
        if isinstance(child, fx.GraphModule):
            yield from _children(child)
        else:
            yield child
