"""Models with positions to train, and the names of parameters in groups."""

import copy
import functools

import timm
import torch
from torch import nn

import dcls_convert
from dcls_convert.layers.dcls_conv import DclsConv2d

from ..conftest import TINY


class Plain(nn.Module):
    """No timm model: layers by hand, two of them tied at the root, names that mislead."""

    def __init__(self):
        super().__init__()
        make = {"kernel_count": 3, "dilated_kernel_size": (5, 7), "padding": (2, 3)}
        self.first = DclsConv2d(3, 4, interpolation="triangle", **make)
        self.second = DclsConv2d(4, 4, **make)
        self.third = DclsConv2d(4, 4, **make)
        self.shared = nn.Parameter(self.second.positions.detach().clone())
        for layer in (self.second, self.third):
            layer.tie_(self, {"positions": "shared"})
        self.positions = nn.Parameter(torch.randn(4, 4, 1, 1))  # not of a DCLS layer
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
    """Groups with names instead of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in groups
    ]
