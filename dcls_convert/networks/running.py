"""Run or change a network that belongs to somebody else, and leave it as it was."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


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


def run(model: nn.Module, batch: Tensor) -> Any:
    """The outputs for a batch, on the model's device and in its dtype."""
    example = next((tensor for tensor in model.parameters() if tensor.is_floating_point()), batch)
    return model(batch.to(example.device, example.dtype))


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """If the block fails, whatever the reason, every module has its parameters, children and attributes of before.

    Args:
        model: What the block changes.
        values: Tensors of the model into which the block writes; copies of them are kept meanwhile.
    """
    before = [(module, _contents(module)) for module in model.modules()]
    copies = [tensor.detach().clone() for tensor in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(values, copies, strict=True):
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
