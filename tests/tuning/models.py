"""Models with trainable positions, and parameter groups by name."""

import copy
import functools

import timm
import torch
from torch import nn

import dcls_convert

from ..conftest import TINY


@functools.cache
def original(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
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
