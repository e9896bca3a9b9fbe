"""Positions of a model brought back into their windows, after a step of an optimizer."""

from torch import nn

from ..layers.dcls_conv import DclsConvNd


def clamp_positions_(model: nn.Module) -> None:
    """Bring all positions back into their windows, and sigmas above their minimum.

    The layers do so themselves whenever they are used in training, and when they are saved. Call
    this after every step to follow the paper to the letter, so that positions are inside at any
    time. Call it also under FSDP2, where the layers clamp only the gathered copies of their
    parameters.
    """
    for layer in model.modules():
        if isinstance(layer, DclsConvNd):
            layer.clamp_positions_()
