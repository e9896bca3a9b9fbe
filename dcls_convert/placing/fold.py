"""Fold: replace every DCLS layer by its plain convolution, which `DclsConvNd.fuse` makes."""

from torch import nn

from ..errors import PlanError, check_argument
from ..layers.conv_classes import has_own_forward
from ..layers.dcls_conv import DclsConvNd
from ..layers.position_parameters import undo_exclusion_from_weight_decay_
from ..networks.timm_notes import change_marked_plan_
from ..networks.wrappers import inside_wrappers
from ..running.model_state import unchanged_on_failure
from .place import PLAN_ATTRIBUTE


def fold_to_dense_(model: nn.Module) -> int:
    """Replace every DCLS layer by its plain convolution.

    Outputs stay the same; each kernel becomes an ordinary dense kernel of the window's size. timm's
    savers (`save_for_hf`, `push_to_hf_hub`) then write a config that rebuilds the folded model.
    Fold with this function before `timm.utils.reparameterize_model`, and before saving.

    Args:
        model: Changed in place. May be wrapped (`torch.compile`, DataParallel, averaged copies).
            A part of a network must hold all layers that share positions: layers outside of it
            would go on reading positions that are no longer in the network.

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
            if has_own_forward(module):
                raise PlanError(
                    f"{name} cannot be folded: it has a forward of its own, set on this very "
                    "object, which a plain convolution would not compute; remove it first"
                )
            layers[name] = module
    plain_conv_of = {layer: layer.fuse() for layer in layers.values()}
    with unchanged_on_failure(model):
        for name, layer in layers.items():
            model.set_submodule(name, plain_conv_of[layer])
        undo_exclusion_from_weight_decay_(model)
        change_marked_plan_(model, {"folded": True})
        vars(model).pop(PLAN_ATTRIBUTE, None)
    return len(plain_conv_of)
