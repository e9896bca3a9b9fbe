"""Layers whose positions belong to another module, so that every tensor has one owner and one name.

The owner is above its layers. Where a network is taken apart below it, as feature extractors do,
the layers stand in for the owner: walks over modules, state dicts and conversions that do not come
through the owner find the tied parameters at each of their layers.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self, cast

from torch import Tensor, nn

POSITION_PARAMETERS = (
    "positions",
    "sigma",
)  # what says where elements are; layers of a tie group share it
APPLY = "_apply"  # the method of nn.Module through which `to`, `cuda`, `half`, `to_empty` and so on change tensors

Change = Callable[[Tensor], Tensor]


class Tied(nn.Module):
    """A layer that holds its positions (and sigma) itself, until it is told of an owner."""

    _owner: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        # Tied parameters are registered there. nn.Module's __setattr__ would register the owner below the layer too.
        self.__dict__["_owner"] = None
        self._owner_names: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:  # reached for what the layer does not have itself
        owner_name = self.__dict__.get("_owner_names", {}).get(name)
        if owner_name is None:
            return super().__getattr__(name)
        shared = getattr(self._owner, owner_name)
        # nn.DataParallel copies every layer to each device, but the copies still refer to the first device's owner.
        return shared.to(self.weight.device) if self.__dict__.get("_is_replica") else shared

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a tied parameter at its owner; `torch.func.functional_call` sets other tensors for a while."""
        owner_name = self.__dict__.get("_owner_names", {}).get(name)
        if owner_name is None or name in self._parameters:  # there inside `_standing_in` alone
            super().__setattr__(name, value)
        else:
            cast(nn.Module, self._owner)._parameters[owner_name] = value

    def tie_(self, owner: nn.Module, names: dict[str, str]) -> None:
        """Use the parameters that `owner`, a module that holds the layer, has under `names`; looked up at each use."""
        for name in names:
            delattr(self, name)
        self.__dict__["_owner"], self._owner_names = owner, dict(names)
        # A partial and a module's function, unlike closures, are copied and pickled as the owner is.
        vars(owner)[APPLY] = partial(_apply_of_owner, owner)
        if _drop_keys_of_parts not in owner._load_state_dict_post_hooks.values():
            owner.register_load_state_dict_post_hook(_drop_keys_of_parts)  # type: ignore[no-untyped-call]

    @property
    def is_tied(self) -> bool:
        """Whether positions (and sigma) belong to another module."""
        return self._owner is not None

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Inside, the tied parameters are registered here too; what replaces them then goes to the owner."""
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
        """The layer, as for any module; `named_parameters` and so optimizers and DDP walk this way.

        In a part without the owner, a module with the tied parameters alone comes first, under the
        name of the layer: the parameters are found as if they were the layer's.
        """
        walked = set() if memo is None else memo
        in_a_part = self.is_tied and self._owner not in walked
        if (
            in_a_part and self not in walked and remove_duplicate
        ):  # else what was walked is not known
            yield prefix, _TiedParameters({name: getattr(self, name) for name in self._owner_names})
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """In a part without the owner, which would have saved them before, with the tied parameters."""
        saved = self.is_tied and self._is_saved_above(destination, prefix)
        with contextlib.nullcontext() if saved else self._standing_in():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _is_saved_above(self, destination: dict[str, Any], prefix: str) -> bool:
        path = prefix.split(".")[:-1]
        prefixes_above = [".".join([*path[:depth], ""]) for depth in range(len(path))]
        return any(
            above + name in destination
            for above in prefixes_above
            for name in self._owner_names.values()
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *more: list[str],
    ) -> None:
        """Takes the tied parameters of a part; without them the part is incomplete.

        The whole network is not: the owner, which is loaded after its layers, takes these keys
        off the missing ones.
        """
        missing: list[str] = []
        with self._standing_in():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing, *more
            )
        tied_keys = {prefix + name for name in self._owner_names}
        for key in missing:
            missing_keys.append(_KeyOfPart(key, self._owner) if key in tied_keys else key)

    def _apply(self, fn: Change, recurse: bool = True) -> Self:
        """With the tied parameters; the owner, if it is there, then finds nothing left to change.

        Not where FSDP2 spreads them over ranks: it moves what it owns by itself.
        """
        spread = any(hasattr(getattr(self, name), "device_mesh") for name in self._owner_names)
        with contextlib.nullcontext() if spread else self._standing_in():
            super()._apply(_keeping_format(fn, self.parameters(recurse=False)), recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With its owner, a layer stays tied to the owner's copy; a layer copied alone gets parameters of its own."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        alone = self.is_tied and id(self._owner) not in memo
        skipped = {"_owner", "_owner_names"} if alone else set()
        new.__dict__.update(
            {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skipped}
        )
        if alone:
            new.__dict__["_owner"], new._owner_names = None, {}
            for name in (
                self._owner_names
            ):  # by the memo, layers that are copied together still share one parameter
                setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new


class _TiedParameters(nn.Module):
    """The tied parameters of a layer, for walks over a part of a network that lacks their owner."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


class _KeyOfPart(str):
    """The missing key of a tied parameter at its layer; not missing where the owner is loaded too."""

    owner: nn.Module | None

    def __new__(cls, key: str, owner: nn.Module | None) -> Self:
        new = super().__new__(cls, key)
        new.owner = owner
        return new


def _drop_keys_of_parts(owner: nn.Module, incompatible: Any) -> None:
    """A hook of torch's after loading the owner and all below it: its parameters were not missing at its layers."""
    keys = incompatible.missing_keys
    keys[:] = [key for key in keys if getattr(key, "owner", None) is not owner]


def release_owner_(owner: nn.Module) -> None:
    """Take off what `tie_` put on a module, once no layer below it is tied to it."""
    vars(owner).pop(APPLY, None)
    hooks = owner._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _drop_keys_of_parts]:
        del hooks[key]


def names_in_use(owner: nn.Module) -> set[str]:
    """Those of its parameters that layers below it share."""
    layers = [
        layer for layer in owner.modules() if isinstance(layer, Tied) and layer._owner is owner
    ]
    return {name for layer in layers for name in layer._owner_names.values()}


def _apply_of_owner(owner: nn.Module, fn: Change, recurse: bool = True) -> Any:
    """`_apply` that keeps the format of parameters that layers share: channels_last fails for tensors of five axes."""
    shared = [getattr(owner, name) for name in names_in_use(owner)]
    return type(owner)._apply(owner, _keeping_format(fn, shared), recurse)  # type: ignore[no-untyped-call]


def _keeping_format(fn: Change, parameters: Iterable[Tensor]) -> Change:
    """`fn` that sees these and their gradients flat: a tensor of one axis has no memory format to be changed."""
    tensors = {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors or hasattr(
            tensor, "device_mesh"
        ):  # spread over ranks by FSDP2
            return fn(tensor)
        flat = tensor.flatten()
        changed = fn(flat)
        # Where nothing changes, nn.Module expects the tensor itself: torch.utils.swap_tensors refuses a view of it.
        return tensor if changed is flat else changed.view(tensor.shape)

    return apply
