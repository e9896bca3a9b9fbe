"""Find convolutions that a network also refers to in other ways than as its submodules.

After a conversion, such a reference would still lead to the old convolution.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..layers.conv_classes import AnyConv

REGISTERED = ("_parameters", "_buffers", "_modules")


def find_references(model: nn.Module) -> dict[nn.Module, str]:
    """Return the convolutions to which attributes or hooks refer, and why they must stay."""
    conv_of_weight: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, AnyConv) and "weight" in module._parameters:
            conv_of_weight[id(module._parameters["weight"])] = module
    reasons: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in REGISTERED:
                continue
            for found in _objects_in(value):
                conv = conv_of_weight.get(id(found), found)
                if isinstance(conv, AnyConv):
                    holder = f"{name or 'the model'} refers to it in {attribute}"
                    reasons.setdefault(conv, f"{holder}, and would continue to use the old one")
    return reasons


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield what containers and functions refer to, at any depth, but not inside other objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, dict):
            waiting += current.values()
        elif isinstance(current, list | tuple | set | frozenset):
            waiting += current
        elif isinstance(current, FunctionType | MethodType | partial):
            waiting += parts_of_function(current)
        else:
            yield current


def parts_of_function(function: Callable[..., Any]) -> list[Any]:
    """Return what a function keeps: its object, its arguments, the variables around it."""
    if isinstance(function, MethodType):
        return [function.__self__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    assert isinstance(function, FunctionType)
    parts: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    return parts
