"""Keep what a network's code caches outside the network as it is, while a copy runs on meta.

Such caches are functions with `functools.lru_cache`, and dictionaries and variables of Python
modules and classes. A tensor on meta that stayed there would fail later, in other networks too.
"""

import contextlib
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .references import FOREIGN_PACKAGES, parts_of_function
from .running import process_state

if TYPE_CHECKING:
    LruCache = functools._lru_cache_wrapper[Any]
Namespace = dict[Any, Any] | type  # a dictionary, a module's global variables, or a class
DICTIONARIES = (dict, OrderedDict, defaultdict)
# From a network's class: its methods, functions that these call, and what those refer to.
CODE_DEPTH = 4


class Caches:
    """The caches to which a network's code refers. Use `separate_caches`."""

    def __init__(self, model: nn.Module) -> None:
        self._lru_caches: dict[LruCache, int] = {}  # with their number of misses
        # With their entries at first.
        self._namespaces: list[tuple[Namespace, dict[Any, Any]]] = []
        for found in _referred_to(model):
            if isinstance(found, functools._lru_cache_wrapper):
                self._lru_caches[found] = found.cache_info().misses
            else:
                self._namespaces.append((found, dict(_entries(found))))

    def set_aside(self) -> bool:
        """Empty every lru_cache, and replace tensors elsewhere by empty ones on meta.

        Other threads would see them, so do so only if the network fails on what it has cached.

        Returns:
            Whether anything was cached.
        """
        found = False
        for cache in self._lru_caches:
            if cache.cache_info().currsize:
                self._clear(cache)
                found = True
        for namespace, entries in self._namespaces:
            for name, value in entries.items():
                if _holds_tensors(value):
                    _set(namespace, name, tree_map_only(Tensor, _on_meta, value))
                    found = True
        return found

    def _clear(self, cache: "LruCache") -> None:
        cache.cache_clear()
        self._lru_caches[cache] = 0

    def restore(self) -> None:
        """Undo changes of entries with tensors, and empty each lru_cache that was added to."""
        for cache, misses in self._lru_caches.items():
            if cache.cache_info().misses > misses:
                self._clear(cache)
        for namespace, entries in self._namespaces:
            for name, value in dict(_entries(namespace)).items():
                if entries.get(name) is value or not _holds_tensors(value):
                    continue
                if name in entries:
                    _set(namespace, name, entries[name])
                else:
                    _delete(namespace, name)


@contextlib.contextmanager
def separate_caches(model: nn.Module) -> Iterator[Caches]:
    """Restore the caches to which a network's code refers after the block."""
    with process_state:
        caches = Caches(model)
        try:
            yield caches
        finally:
            caches.restore()


def _referred_to(model: nn.Module) -> "Iterator[LruCache | Namespace]":
    """Yield each lru_cache, dictionary and namespace that the code of a network can reach."""
    waiting: deque[tuple[Any, int]] = deque()
    for module in model.modules():
        waiting += [(base, 0) for base in type(module).__mro__]
        waiting += [(value, 1) for value in vars(module).values() if callable(value)]
    seen: set[int] = set()
    while waiting:
        value, depth = waiting.popleft()
        if id(value) in seen or depth > CODE_DEPTH or _is_foreign(value):
            continue
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper | type) or type(value) in DICTIONARIES:
            yield value
        parts = _parts_of(value)
        if isinstance(value, FunctionType) and id(value.__globals__) not in seen:
            seen.add(id(value.__globals__))
            yield value.__globals__
            parts += value.__globals__.values()
        waiting += [(part, depth + 1) for part in parts]


def _parts_of(value: Any) -> list[Any]:
    """Return what a class or a function refers to, except global variables."""
    if isinstance(value, type):
        return list(vars(value).values())
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, MethodType):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, FunctionType | functools.partial):
        return parts_of_function(value)
    return []


def _is_foreign(value: Any) -> bool:
    """True for functions and classes of torch or of Python itself."""
    if not isinstance(value, type | FunctionType | functools._lru_cache_wrapper):
        return False
    package = str(value.__module__).partition(".")[0]
    return package in FOREIGN_PACKAGES


def _entries(namespace: Namespace) -> Mapping[Any, Any]:
    return vars(namespace) if isinstance(namespace, type) else namespace


def _set(namespace: Namespace, name: Any, value: Any) -> None:
    if isinstance(namespace, type):
        setattr(namespace, name, value)
    else:
        namespace[name] = value


def _delete(namespace: Namespace, name: Any) -> None:
    if isinstance(namespace, type):
        delattr(namespace, name)
    else:
        del namespace[name]


def _holds_tensors(value: Any) -> bool:
    if not isinstance(value, Tensor | list | tuple | dict):
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _on_meta(tensor: Tensor) -> Tensor:
    """Return an empty tensor on meta; parameters stay, as they may be the network's own."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor, device="meta")
