"""Layers whose positions belong to another module, so that every tensor has one owner and one name."""

import copy
from typing import Any, Self

from torch import nn

SHARED_PARAMETERS = ("positions", "sigma")  # what layers of a tie group have in common


class Tied(nn.Module):
    """A layer that holds its positions (and sigma) by itself, until it is told of an owner."""

    _owner: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        # The module on which tied parameters are registered, and their names there. Not through nn.Module's
        # __setattr__, which would register the owner below the layer as well.
        self.__dict__["_owner"] = None
        self._owner_names: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        # Reached for tied parameters alone: those of its own are found in the layer.
        owner_name = self.__dict__.get("_owner_names", {}).get(name)
        return super().__getattr__(name) if owner_name is None else getattr(self._owner, owner_name)

    def tie_(self, owner: nn.Module, names: dict[str, str]) -> None:
        """Use `owner`'s parameters from now on, `names["positions"]` for the positions, and drop the layer's own.

        The parameter is registered on the owner alone, so that every tensor has one name in the state dict, and is
        looked up at each use, so that replacing it there (`to_empty`, `load_state_dict(assign=True)`, FSDP2) counts.

        Args:
            owner: A module that holds the layer, so that copies of it hold the layer's copy.
            names: "positions" (and "sigma", where the layer has one) -> the parameter's name on the owner.

        Raises:
            ValueError: The names or shapes do not fit, or the layer is tied; it is then unchanged.
        """
        if self.is_tied:
            raise ValueError("the layer is tied already")
        own = {name for name in SHARED_PARAMETERS if self._parameters.get(name) is not None}
        if names.keys() != own:
            raise ValueError(f"names must say where to find {' and '.join(sorted(own))}, not {sorted(names)}")
        for owner_name in names.values():
            shape = tuple(getattr(owner, owner_name).shape)
            if shape != tuple(self._parameters["positions"].shape):  # type: ignore[union-attr]
                raise ValueError(f"the owner's {owner_name} has shape {shape}, which does not fit this layer")
        for name in names:
            del self._parameters[name]
        self.__dict__["_owner"] = owner
        self._owner_names = dict(names)

    def untie_(self) -> None:
        """Hold the shared parameters as its own from now on, the same objects. The owner keeps them too."""
        for name, owner_name in self._owner_names.items():
            self._parameters[name] = getattr(self._owner, owner_name)
        self.__dict__["_owner"], self._owner_names = None, {}

    @property
    def is_tied(self) -> bool:
        """Whether positions (and sigma) belong to another module."""
        return self._owner is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With its owner, a layer stays tied to the owner's copy; a layer copied alone gets parameters of its own."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        alone = self.is_tied and id(self._owner) not in memo
        skipped = {"_owner", "_owner_names"} if alone else set()
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in skipped})
        if alone:
            new.__dict__["_owner"], new._owner_names = None, {}
            for name in self._owner_names:
                shared = getattr(self, name)
                setattr(new, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
        return new
