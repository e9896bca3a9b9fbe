"""Save and restore the state of a user's network: the contents of its modules."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..layers.conv_classes import AnyConv
from ..layers.dcls_conv import DclsConvNd


def _plain_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules, without lazy ones (no values yet) and TorchScript (no new buffers)."""
    modules = []
    for module in model.modules():
        if not isinstance(module, LazyModuleMixin | torch.jit.ScriptModule):
            modules.append(module)
    return modules


def containers_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return pairs of a container of the modules and a copy of its contents.

    The containers are each module's attribute dictionary, and the dictionaries, lists and sets
    among the attributes: parameters, buffers, children, hooks, and the network's own containers.
    """
    saved: list[tuple[Any, Any]] = []
    for module in _plain_modules(model):
        attributes = vars(module)
        for container in (attributes, *attributes.values()):
            if isinstance(container, dict):
                saved.append((container, dict(container)))
            elif isinstance(container, list | set | deque):
                saved.append((container, list(container)))
    return saved


def refill_(saved: Iterable[tuple[Any, Any]]) -> None:
    """Refill each container with its contents.

    The containers themselves stay, because hook handles refer to some of them.
    """
    for container, contents in saved:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(contents)
        else:
            container.update(contents)


def copy_tensors_(model: nn.Module, *, on_meta: bool) -> None:
    """Replace buffers, and tensors in attributes, by copies, which `forward` may change in place.

    With `on_meta`, parameters are replaced, too, and the copies have no values.

    `functional_call` would not suffice: if `forward` sets a buffer that was None, it stays set.
    """
    copies: dict[int, Tensor] = {}  # by the id of the original, which modules can share
    for module in _plain_modules(model):
        places: list[dict[str, Any]] = [vars(module), module._buffers]
        if on_meta:
            places.append(module._parameters)
        for tensors in places:
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = (
                            tensor.detach().to("meta") if on_meta else tensor.clone()
                        )
                    tensors[name] = copies[id(tensor)]


def image_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of images for a model: the first convolution's, or the first parameter's.

    In a model of several dtypes, the image enters through the first convolution.
    """
    for module in model.modules():
        if isinstance(module, AnyConv | DclsConvNd) and module.weight.is_floating_point():
            return module.weight.dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore the model and the `values` if the block fails.

    Every module gets back its parameters, children, hooks and attributes, with the contents of
    lists, dictionaries and sets. The contents of tensors are restored only for `values`.
    """
    saved = containers_of(model)
    copies = [tensor.detach().clone() for tensor in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(values, copies, strict=True):
                tensor.copy_(copy)
        refill_(saved)
        raise
