"""Run a network that belongs to somebody else, and leave it as it was."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode and nothing is recorded for gradients; afterwards each has its own mode.

    Modes are kept module by module: a frozen BatchNorm is in eval mode inside a model that trains. They are set
    directly, since `eval` and `train` may be the model's own.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
