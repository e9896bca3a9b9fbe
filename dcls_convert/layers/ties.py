"""Tie layers: their positions belong to another module, so each tensor has one owner and one name.

The owner is a module that contains its layers. The tied parameters are registered only there.
Feature extractors may take a subnetwork out of a network without the owner. In it, each layer acts
as if the tied parameters were its own.

| torch's mechanism            | what would go wrong                    | what prevents it         |
| ---------------------------- | -------------------------------------- | ------------------------ |
| reading `layer.positions`    | the layer does not have it             | `__getattr__`            |
| `torch.func.functional_call` | it would set the tensor at the layer,  | `__setattr__`            |
|                              | and so untie the layer                 |                          |
| `DataParallel`               | replicas would read the parameters of  | `__getattr__`            |
|                              | the first device's owner               |                          |
| `named_parameters` (walked   | a subnetwork would lack the parameters | `named_modules`          |
| by optimizers and DDP)       |                                        |                          |
| `state_dict`                 | a subnetwork would not save them       | `_save_to_state_dict`    |
| `load_state_dict`            | a subnetwork would not load them; in a | `_load_from_state_dict`, |
|                              | whole network, layers would miss them  | `_drop_keys_of_layers`   |
| `to`, `cuda`, `to_empty`     | a subnetwork would not convert them;   | `_apply`,                |
| (which call `_apply`)        | channels_last fails on five axes       | `_apply_of_owner`        |
| `copy.deepcopy`              | a layer copied alone would copy its    | `__deepcopy__`           |
|                              | owner, with all that is below it       |                          |
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self, cast

from torch import Tensor, nn

from .clamp_tensors import is_sharded

# The parameters that say where elements are. Layers of a tie group share them.
POSITION_PARAMETERS = ("positions", "sigma")
# The method of nn.Module with which `to`, `cuda`, `half`, `to_empty` and so on change tensors.
APPLY = "_apply"

TensorChange = Callable[[Tensor], Tensor]


class Tieable(nn.Module):
    """A layer that has its own positions (and sigma) until `tie_` gives it an owner."""

    _owner: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        # Bypass nn.Module's __setattr__, which would register the owner as a child of the layer.
        self.__dict__["_owner"] = None
        self._owner_names: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Get a tied parameter from the owner; called for what the layer does not have itself."""
        own = self.__dict__.get("_parameters", {})
        if name in own:  # the most frequent case, here without the search of nn.Module
            return own[name]
        owner_name = self.__dict__.get("_owner_names", {}).get(name)
        if owner_name is None:
            return super().__getattr__(name)
        shared = getattr(self._owner, owner_name)
        if self.__dict__.get("_is_replica"):
            # nn.DataParallel copies every layer to each device, but the copies still refer to the
            # first device's owner.
            return shared.to(self.weight.device)
        return shared

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a tied parameter on its owner.

        `torch.func.functional_call` sets other tensors temporarily in this way.
        """
        owner_name = self.__dict__.get("_owner_names", {}).get(name)
        # The layer itself has tied parameters only inside `_own_temporarily`.
        if owner_name is None or name in self._parameters:
            super().__setattr__(name, value)
        else:
            cast(nn.Module, self._owner)._parameters[owner_name] = value

    def tie_(self, owner: nn.Module, names: dict[str, str]) -> None:
        """Use parameters of `owner`, a module that contains the layer, in place of the layer's own.

        `names` maps the layer's names to the owner's. The parameters are looked up at each use.
        """
        for name in names:
            delattr(self, name)
        self.__dict__["_owner"] = owner
        self._owner_names = dict(names)
        # A partial of a module-level function can be copied and pickled with the owner; a closure
        # cannot.
        vars(owner)[APPLY] = partial(_apply_of_owner, owner)
        if _drop_keys_of_layers not in owner._load_state_dict_post_hooks.values():
            register: Any = owner.register_load_state_dict_post_hook  # untyped in torch
            register(_drop_keys_of_layers)

    @property
    def is_tied(self) -> bool:
        """True if positions (and sigma) belong to another module."""
        return self._owner is not None

    def release_tied_parameters_(self) -> None:
        """Remove the tied parameters from their owner if no other layer uses them.

        Call this after the layer has been removed from the network, since layers below the owner
        count as users. The layer itself stays tied.
        """
        owner = self._owner
        if owner is None:
            return
        in_use = _shared_parameter_names(owner)
        for name in self._owner_names.values():
            if name not in in_use:
                owner._parameters.pop(name, None)
        if not in_use:
            _release_owner_(owner)

    @contextlib.contextmanager
    def _own_temporarily(self) -> Iterator[None]:
        """Register the tied parameters on the layer too, inside a `with` block.

        Afterwards, the owner gets whatever has replaced them.
        """
        for name in self._owner_names:
            self._parameters[name] = getattr(self, name)
        try:
            yield
        finally:
            for name, owner_name in self._owner_names.items():
                cast(nn.Module, self._owner)._parameters[owner_name] = self._parameters.pop(name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Walk over the layer, as `nn.Module.named_modules` does.

        `named_parameters` uses this walk, and so do optimizers and DDP. In a subnetwork without the
        owner, a module with only the tied parameters is yielded first, under the layer's name, so
        that the parameters are found as if they were the layer's.
        """
        visited = set() if memo is None else memo
        owner_is_missing = self.is_tied and self._owner not in visited
        # With `remove_duplicate=False`, torch does not record in the memo what was visited.
        if owner_is_missing and self not in visited and remove_duplicate:
            tied_parameters = {name: getattr(self, name) for name in self._owner_names}
            yield prefix, _TiedParameters(tied_parameters)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the layer and, in a subnetwork without the owner, the tied parameters."""
        saved_by_owner = self.is_tied and self._is_saved_above(destination, prefix)
        with contextlib.ExitStack() as context:
            if not saved_by_owner:
                context.enter_context(self._own_temporarily())
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _is_saved_above(self, destination: dict[str, Any], prefix: str) -> bool:
        """True if the owner, which is saved before its layers, has saved the tied parameters."""
        path = prefix.split(".")[:-1]
        for depth in range(len(path)):
            prefix_above = ".".join([*path[:depth], ""])
            if any(prefix_above + name in destination for name in self._owner_names.values()):
                return True
        return False

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *more: list[str],
    ) -> None:
        """Load the layer, including the tied parameters.

        The state dict of a subnetwork has them under the layer's name. That of a whole network does
        not, so their keys are reported as missing. The owner, which is loaded after its layers,
        then removes these keys again.
        """
        missing: list[str] = []
        with self._own_temporarily():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing, *more
            )
        tied_keys = {prefix + name for name in self._owner_names}
        for key in missing:
            if key in tied_keys:
                missing_keys.append(_KeyOfLayer(key, self._owner))
            else:
                missing_keys.append(key)

    def _apply(self, fn: TensorChange, recurse: bool = True) -> Self:
        """Change the layer's tensors, including the tied parameters.

        The owner, if it is there, then finds them changed already. Sharded tied parameters are left
        out, because FSDP2 moves them itself.
        """
        owned_by_fsdp = any(is_sharded(getattr(self, name)) for name in self._owner_names)
        with contextlib.ExitStack() as context:
            if not owned_by_fsdp:
                context.enter_context(self._own_temporarily())
            change = _on_flat_tensors(fn, self.parameters(recurse=False))
            super()._apply(change, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer.

        If the owner is copied too, the copy is tied to the owner's copy. Otherwise it gets
        parameters of its own.
        """
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        copied_alone = self.is_tied and id(self._owner) not in memo
        for name, value in self.__dict__.items():
            if copied_alone and name in ("_owner", "_owner_names"):
                continue
            new.__dict__[name] = copy.deepcopy(value, memo)
        if copied_alone:
            new.__dict__["_owner"] = None
            new._owner_names = {}
            # Thanks to the memo, layers that are copied together still share one parameter.
            for name in self._owner_names:
                setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new


class _TiedParameters(nn.Module):
    """The tied parameters of a layer, for walks over a subnetwork that lacks their owner."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


class _KeyOfLayer(str):
    """The key of a tied parameter at its layer; missing only if the owner is not loaded."""

    owner: nn.Module | None

    def __new__(cls, key: str, owner: nn.Module | None) -> Self:
        new = super().__new__(cls, key)
        new.owner = owner
        return new


def _drop_keys_of_layers(owner: nn.Module, incompatible: Any) -> None:
    """Remove the keys of tied parameters at layers from the missing keys.

    torch calls this hook after it has loaded the owner and all modules below it. The parameters
    were loaded with the owner, so they are not missing at its layers.
    """
    keys = incompatible.missing_keys
    keys[:] = [key for key in keys if getattr(key, "owner", None) is not owner]


def _release_owner_(owner: nn.Module) -> None:
    """Remove what `tie_` has added to a module, once no layer below it is tied to it."""
    vars(owner).pop(APPLY, None)
    hooks = owner._load_state_dict_post_hooks
    for key, hook in list(hooks.items()):
        if hook is _drop_keys_of_layers:
            del hooks[key]


def _shared_parameter_names(owner: nn.Module) -> set[str]:
    """Return the names of the owner's parameters that layers below it share."""
    names: set[str] = set()
    for layer in owner.modules():
        if isinstance(layer, Tieable) and layer._owner is owner:
            names.update(layer._owner_names.values())
    return names


def _apply_of_owner(owner: nn.Module, fn: TensorChange, recurse: bool = True) -> Any:
    """Replace the owner's `_apply`: parameters that layers share are flattened for the change."""
    shared = [getattr(owner, name) for name in _shared_parameter_names(owner)]
    change = _on_flat_tensors(fn, shared)
    return type(owner)._apply(owner, change, recurse)  # type: ignore[no-untyped-call]


def _on_flat_tensors(fn: TensorChange, parameters: Iterable[Tensor]) -> TensorChange:
    """Wrap `fn` so that it receives these parameters and their gradients flattened.

    `to(memory_format=channels_last)` fails on positions with five axes, and a 1-D tensor has no
    memory format.
    """
    flattened: set[int] = set()  # ids of tensors
    for parameter in parameters:
        flattened |= {id(parameter), id(parameter.grad)}

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in flattened or is_sharded(tensor):
            return fn(tensor)
        flat = tensor.flatten()
        changed = fn(flat)
        if changed is flat:
            # Return the tensor itself: torch.utils.swap_tensors refuses a view of it.
            return tensor
        return changed.view(tensor.shape)

    return apply
