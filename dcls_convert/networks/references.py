"""Find convolutions that a network also refers to in other ways than as its submodules.

After a conversion, such a reference would still lead to the old convolution.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any
from weakref import ReferenceType

from torch import Tensor, nn

from ..layers.conv_classes import AnyConv

REGISTRIES_OF_MODULES = ("_parameters", "_buffers", "_modules")
# Code of torch and of Python itself keeps no convolutions and no tensors of a network.
FOREIGN_PACKAGES = frozenset({"torch", *sys.stdlib_module_names}) - {"__main__"}
OBJECT_DEPTH = 4  # of objects inside objects that are searched
MAX_OBJECTS = 10_000  # that are searched for one attribute


def find_references(model: nn.Module) -> dict[nn.Module, str]:
    """Return the convolutions to which attributes or hooks refer, and why they must stay."""
    own = set(model.modules())
    conv_of_weight: dict[int, nn.Module] = {}
    for module in own:
        if isinstance(module, AnyConv) and "weight" in module._parameters:
            conv_of_weight[id(module._parameters["weight"])] = module
    reasons: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in REGISTRIES_OF_MODULES:
                continue
            for found in _objects_in(value, own):
                conv = conv_of_weight.get(id(found), found)
                if isinstance(conv, AnyConv):
                    holder = f"{name or 'the model'} refers to it in {attribute}"
                    reasons.setdefault(conv, f"{holder}, and would continue to use the old one")
    return reasons


def _objects_in(value: Any, own: Set[nn.Module]) -> Iterator[Any]:
    """Yield tensors and the network's own modules to which a value refers.

    Containers and functions are followed at any depth, and other objects as far as the bounds.
    """
    seen: set[int] = set()
    waiting = [(value, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        current, depth = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        parts: Iterable[Any] = ()
        if isinstance(current, dict):
            parts = current.values()
        elif isinstance(current, list | tuple | set | frozenset | deque):
            parts = current
        elif isinstance(current, FunctionType | MethodType | partial):
            parts = parts_of_function(current)
        elif isinstance(current, ReferenceType):
            parts = [current()]
        elif isinstance(current, nn.Module) and current not in own:
            registries = [vars(current).get(name, {}) for name in REGISTRIES_OF_MODULES]
            parts = [part for registry in registries for part in registry.values()]
        elif isinstance(current, Tensor | nn.Module):
            yield current
        elif depth < OBJECT_DEPTH:
            depth += 1
            parts = _fields_of(current)
        waiting += [(part, depth) for part in parts]


def _fields_of(value: Any) -> list[Any]:
    """Return the attributes that an object itself keeps; none for objects of torch or Python.

    The object's own code does not run. Optimizers, for example, keep weights but call nothing.
    """
    fields: list[Any] = []
    for base in type(value).__mro__[:-1]:
        if base.__module__.partition(".")[0] in FOREIGN_PACKAGES and base is not SimpleNamespace:
            return []
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType):  # a slot
                with contextlib.suppress(AttributeError):  # without a value
                    fields.append(member.__get__(value))
    with contextlib.suppress(AttributeError):
        fields += object.__getattribute__(value, "__dict__").values()
    return fields


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
