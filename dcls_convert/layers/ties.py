"""Layers whose positions belong to another module, so that every tensor has one owner and one name."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

POSITION_PARAMETERS = ("positions", "sigma")  # what says where elements are; layers of a tie group share it
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

    def tie_(self, owner: nn.Module, names: dict[str, str]) -> None:
        """Use the parameters that `owner`, a module that holds the layer, has under `names`; looked up at each use."""
        for name in names:
            delattr(self, name)
        self.__dict__["_owner"], self._owner_names = owner, dict(names)
        vars(owner)[APPLY] = partial(_apply_of_owner, owner)  # unlike a closure, copies and pickles as the owner does

    @property
    def is_tied(self) -> bool:
        """Whether positions (and sigma) belong to another module."""
        return self._owner is not None

    def _apply(self, fn: Change, recurse: bool = True) -> Self:
        super()._apply(_keeping_format(fn, self.parameters()), recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With its owner, a layer stays tied to the owner's copy; a layer copied alone gets parameters of its own."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        alone = self.is_tied and id(self._owner) not in memo
        skipped = {"_owner", "_owner_names"} if alone else set()
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skipped})
        if alone:
            new.__dict__["_owner"], new._owner_names = None, {}
            for name in self._owner_names:  # by the memo, layers that are copied together still share one parameter
                setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new


def names_in_use(owner: nn.Module) -> set[str]:
    """Those of its parameters that layers below it share."""
    layers = [layer for layer in owner.modules() if isinstance(layer, Tied) and layer._owner is owner]
    return {name for layer in layers for name in layer._owner_names.values()}


def _apply_of_owner(owner: nn.Module, fn: Change, recurse: bool = True) -> Any:
    """`_apply` that keeps the format of parameters that layers share: channels_last fails for tensors of five axes."""
    shared = [getattr(owner, name) for name in names_in_use(owner)]
    return type(owner)._apply(owner, _keeping_format(fn, shared), recurse)  # type: ignore[no-untyped-call]


def _keeping_format(fn: Change, parameters: Iterable[Tensor]) -> Change:
    """`fn` that sees these and their gradients flat: a tensor of one axis has no memory format to be changed."""
    tensors = {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}

    def apply(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors or hasattr(tensor, "device_mesh"):  # spread over ranks by FSDP2
            return fn(tensor)
        flat = tensor.flatten()
        changed = fn(flat)
        # Where nothing changes, nn.Module expects the tensor itself: torch.utils.swap_tensors refuses a view of it.
        return tensor if changed is flat else changed.view(tensor.shape)

    return apply
