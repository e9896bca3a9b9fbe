"""Find convolutions whose weight or settings other code uses, while a copy of the network runs.

Also record the operations that run, except those inside convolutions.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..layers.conv_classes import AnyConv
from .operations import Operation

# What differs between a convolution and its DCLS layer, besides the weight.
REPLACED_ATTRIBUTES = frozenset({"kernel_size", "padding", "dilation", "_conv_forward"})
# Attributes of the weight that are the same in the DCLS layer. Its shape is not.
SAME_OF_WEIGHT = frozenset({"dtype", "device", "is_meta", "is_cuda", "requires_grad", "grad"})
# Functions that take only dtype and device from a tensor: from the first argument, or another one.
DTYPE_OF_FIRST = ("new_", "is_floating_point", "is_complex", "get_device")
DTYPE_OF_OTHER = ("to", "type_as")

# Functions whose output is like their first argument.
NORMS = (nn.functional.batch_norm, nn.functional.layer_norm, nn.functional.group_norm)


class ConvUses(TorchFunctionMode):
    """Records what uses a convolution's weight or settings outside the convolution's own forward.

    Args:
        model: A copy of the network on meta, which nothing else uses. While the mode is active, its
            convolutions have classes that watch them.
        original: The network. Functions and hooks of the copy may refer to tensors of the original;
            they get empty ones on meta instead.
    """

    def __init__(self, model: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}  # name of a convolution -> how it is used
        self.operations: list[Operation] = []  # outside convolutions, and the convolutions
        self.names: dict[nn.Module, str] = {}
        self._weights: dict[nn.Module, Tensor | None] = {}
        self._running: list[nn.Module] = []  # convolutions whose forward is running
        # Views and `weight.data` are other tensors, but have the weight's storage.
        self._conv_of_storage: dict[int, nn.Module] = {}
        self._original_storages = _storages(original)
        for name, module in model.named_modules():
            # A lazy convolution changes its class itself the first time it runs.
            if isinstance(module, AnyConv) and not isinstance(module, LazyModuleMixin):
                self.names[module] = name
                self._weights[module] = module._parameters.get("weight")
                for conv in (module, original.get_submodule(name)):
                    weight = conv._parameters.get("weight")
                    if weight is not None:
                        self._conv_of_storage[_storage(weight)] = module
        self._watched_classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> "ConvUses":
        for conv in self.names:
            self._restore.enter_context(self._watched(conv))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._restore.close()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        for index, value in enumerate(leaves):
            if not isinstance(value, Tensor):
                continue
            storage = _storage(value)
            if storage in self._conv_of_storage and not _reads_only_dtype(func, index):
                conv = self._conv_of_storage[storage]
                self.note(conv, "its weight is used outside its own forward")
            if storage in self._original_storages:
                leaves[index] = torch.empty_like(value, device="meta")
        args, kwargs = tree_unflatten(leaves, structure)
        if func in NORMS:
            # On meta, torch computes norms in Python, which is slow.
            output = torch.empty_like(args[0])
        else:
            output = func(*args, **kwargs)
        self._record(func, args, kwargs, output)
        return output

    def _record(self, run: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not self._running:
            self.operations.append(Operation(run, args, kwargs, output))

    def note(self, conv: nn.Module, reason: str) -> None:
        """Record a use, unless it is the convolution's own."""
        if not any(conv is running for running in self._running):
            self.reasons.setdefault(self.names[conv], reason)

    @contextlib.contextmanager
    def _watched(self, conv: nn.Module) -> Iterator[None]:
        own_class = type(conv)
        if own_class not in self._watched_classes:
            self._watched_classes[own_class] = self._watched_class(own_class)
        conv.__class__ = self._watched_classes[own_class]
        try:
            yield
        finally:
            conv.__class__ = own_class

    def _watched_class(self, own_class: type[nn.Module]) -> type[nn.Module]:
        """Make a subclass that notes who reads or sets the settings of its instances."""
        uses = self

        class Watched(own_class):  # type: ignore[valid-type, misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                if self._parameters.get("weight") is not uses._weights[self]:
                    uses.note(self, "its weight is replaced while it runs")
                uses._running.append(self)
                try:
                    output = super().forward(*args, **kwargs)
                finally:
                    uses._running.pop()
                uses._record(self, args, kwargs, output)
                return output

            def __getattribute__(self, name: str) -> Any:
                if name in REPLACED_ATTRIBUTES:
                    uses.note(self, f"its {name} is read outside its own forward")
                return super().__getattribute__(name)

            def __setattr__(self, name: str, value: Any) -> None:
                if name in REPLACED_ATTRIBUTES or name == "weight":
                    uses.note(self, f"its {name} is set outside its own forward")
                super().__setattr__(name, value)

        for name in ("__name__", "__qualname__", "__module__"):
            setattr(Watched, name, getattr(own_class, name))
        return Watched


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage itself; `data_ptr` is 0 for all meta tensors."""
    return int(tensor.untyped_storage()._cdata)


def _storages(model: nn.Module) -> set[int]:
    """Return the storages of all parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return {_storage(tensor) for tensor in tensors if not is_lazy(tensor)}


def _reads_only_dtype(func: Any, index: int) -> bool:
    """True if a function reads no more than dtype, device or gradient of its argument `index`."""
    name: str = func.__name__
    attribute = getattr(func, "__self__", None)  # if `func` gets an attribute of a tensor
    if getattr(attribute, "__name__", None) in SAME_OF_WEIGHT:
        return True
    if index == 0:
        return name.startswith(DTYPE_OF_FIRST)
    return name in DTYPE_OF_OTHER
