"""Clamp the positions of a model to their windows after an optimizer step."""

from torch import nn

from ..errors import check_argument
from ..layers.dcls_conv import DclsConvNd


def clamp_positions_(model: nn.Module) -> None:
    """Clamp all positions to their windows, and all sigmas to at least their minimum.

    The layers clamp their own parameters in each training forward pass and when they are saved.
    Call this after every step to follow the paper to the letter, so that positions are always
    inside their windows. Under FSDP2 it is needed, since the layers there clamp only the gathered
    copies of their parameters.
    """
    check_argument("model", model, nn.Module)
    for layer in model.modules():
        if isinstance(layer, DclsConvNd):
            layer.clamp_positions_()
