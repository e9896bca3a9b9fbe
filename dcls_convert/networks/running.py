"""Run or change a network that belongs to somebody else, and leave it as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """If the block fails, whatever the reason, every module has its parameters, children and attributes of before.

    Args:
        model: What the block changes.
        values: Whether the block also writes into tensors of the model; a copy of them is kept meanwhile.
    """
    before = [(module, _contents(module)) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()] if values else []
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for module, (attributes, registries) in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in registries.items():
                attributes[name].clear()
                attributes[name].update(entries)
        raise


def _contents(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The attributes of a module, and what its registries hold; the registries stay the same objects."""
    registries = {name: dict(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules")}
    return dict(vars(module)), registries
