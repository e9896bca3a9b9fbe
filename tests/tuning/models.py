"""Models with trainable positions, and parameter groups by name."""

import copy
import functools

import timm
import torch
from torch import nn

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY


class Plain(nn.Module):
    """Not a timm model: DCLS layers, two of them tied, and misleading names."""

    def __init__(self):
        super().__init__()
        make = {"kernel_count": 3, "dilated_kernel_size": (5, 7), "padding": (2, 3)}
        self.first = DclsConv2d(3, 4, interpolation="triangle", **make)
        self.second = DclsConv2d(4, 4, **make)
        self.third = DclsConv2d(4, 4, **make)
        self.third.tie_(self.second)
        self.positions = nn.Parameter(torch.randn(4, 4, 1, 1))  # not used by a DCLS layer
        self.token = nn.Parameter(torch.randn(1, 4))

    def no_weight_decay(self):
        return {"token"}


@functools.cache
def original(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "plain":
            return Plain()
        model = timm.create_model("test_resnet" if kind == "resnet" else TINY)
        if kind != "no dcls":
            interpolation = "gaussian" if kind == "gaussian" else "bilinear"
            size = 5 if kind == "resnet" else 9
            dcls_convert.convert_(
                model, dilated_size=size, init="random", interpolation=interpolation
            )
        return model


def converted(kind: str) -> nn.Module:
    return copy.deepcopy(original(kind))


def named(model: nn.Module, groups) -> list[dict]:
    """Replace the parameters in groups by their names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in groups
    ]
