"""Tie layers: the first layer of a group has the positions, and the others read them there.

A tied layer refers to the first layer by an attribute that is not a child module. So each tensor
has one owner and one name, and torch's walks, savers and optimizers need to know nothing of ties.

In a part of a network without the first layer, tied layers still read its positions, but these are
not among the part's parameters. `copy.deepcopy` of such a part gives the copy its own positions.
For example, with four layers, of which layer 0 has the positions:

    layers, as deepcopy meets them      copies
    0 1 2 3                             0' has positions; 1', 2' and 3' read them there
    1 2 3      a part of the network    1' has positions of its own; 2' and 3' read them there
    2 1 0 3    a hook refers to 2, and  2' has positions of its own, and 1' reads them there,
               hooks are copied first   until 0' is made: then 2' and 3' read the positions of 0'
"""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..depthwise.eager import is_eager
from .interpolation import POSITION_PARAMETERS


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for positions in a network of this dtype.

    In bfloat16, an update of a position of two cells is rounded away if it is less than 1/128 cell.
    """
    if dtype.itemsize < torch.float32.itemsize:  # torch.promote_types refuses float8
        return torch.float32
    return dtype


def is_sharded(tensor: Tensor) -> bool:
    """True if FSDP2 has sharded the tensor, which makes it a DTensor."""
    return hasattr(tensor, "device_mesh")


def is_flattened(tensor: Tensor) -> bool:
    """True if FSDP1 has made the tensor a part of a flat shard, or freed its memory for a while.

    Except for the bias, the tensors of a layer have at least three axes.
    """
    if tensor.dim() == 1:
        return True
    # FSDP1 frees the memory of views of its flat parameter. Tensors of torch.func have no storage.
    if isinstance(tensor, nn.Parameter) or not is_eager(tensor):
        return False
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _check_sharded_together(first: nn.Module, shared: Tensor, weight: Tensor) -> None:
    """Refuse (RuntimeError) positions of the first layer that FSDP keeps apart from this weight."""
    if is_sharded(shared) and not is_sharded(weight):
        raise RuntimeError(
            "FSDP2 has sharded the positions of this layer with another one: give fully_shard "
            "the whole stage whose layers share them, not its first block alone"
        )
    if _are_in_different_units(first, shared, weight):
        raise RuntimeError(
            "FSDP1 has sharded the positions of this layer with another one: wrap the whole "
            "stage whose layers share them, not its blocks, or convert with tie='none'"
        )


def _are_in_different_units(first: nn.Module, shared: Tensor, weight: Tensor) -> bool:
    """True if FSDP1 has put the positions of the first layer into another unit than this weight."""
    if is_flattened(shared):
        return not is_flattened(weight)
    # In one process, or with NO_SHARD, nothing is freed, so look at the types. In the forward pass
    # of a unit, its parameters are plain tensors: an `nn.Parameter` belongs to another unit, and
    # would learn wrongly.
    is_parameter = isinstance(shared, nn.Parameter) and not isinstance(weight, nn.Parameter)
    return is_parameter and hasattr(first, "_is_fsdp_managed_module")


class Tieable(nn.Module):
    """A layer that has its own positions (and sigma) until `tie_` gives it another layer's."""

    def __init__(self) -> None:
        super().__init__()
        # The first layer, in a tuple because nn.Module would register it as a child.
        self._tied_to: tuple[Tieable, ...] = ()

    def tie_(self, first: "Tieable") -> None:
        """Read the positions (and sigma) of `first` from now on, at each use.

        `first` must come before this layer in the network, because positions are named by it.
        """
        for name in POSITION_PARAMETERS:
            self._parameters.pop(name, None)
        self._tied_to = (first,)

    @property
    def owner(self) -> "Tieable":
        """The layer that owns the positions (and sigma): the group's first, or the layer itself."""
        return self._tied_to[0].owner if self._tied_to else self

    @property
    def is_tied(self) -> bool:
        """True if positions (and sigma) belong to another layer."""
        return bool(self._tied_to)

    def __getattr__(self, name: str) -> Any:
        """Get a parameter; Python calls this for names that are not in `__dict__`."""
        own = self.__dict__.get("_parameters", {})
        if name in own:  # the most frequent case, here without the search of nn.Module
            return own[name]
        if name in POSITION_PARAMETERS and self.__dict__.get("_tied_to"):
            return self._read_from_first(name)
        return super().__getattr__(name)

    def _read_from_first(self, name: str) -> Any:
        """Return a parameter of the first layer, on this layer's device."""
        (first,) = self._tied_to
        shared = getattr(first, name)
        # In the copies that nn.DataParallel makes, weights are plain attributes.
        weight = self._parameters.get("weight", self.__dict__.get("weight"))
        if shared is None or weight is None:
            return shared
        # FSDP1 flattens parameters, and FSDP2 gives them a type of its own.
        are_whole = type(shared) is type(weight) is nn.Parameter and shared.dim() > 1
        if not are_whole:
            _check_sharded_together(first, shared, weight)
        if shared.device == weight.device:
            return shared
        if shared.is_meta and hasattr(first, "_hf_hook"):
            # accelerate loads the first layer only for its forward pass: let it do so now.
            first._hf_hook.pre_forward(first)
            shared = getattr(first, name)
            first._hf_hook.post_forward(first, None)
        return shared.to(weight.device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Copy the layer.

        If the first layer is not copied too, the copy gets its own positions, and layers of the
        group that are copied later in the same deepcopy share them.
        """
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            if name != "_tied_to":
                new.__dict__[name] = copy.deepcopy(value, memo)
        new._tied_to = ()
        if self.is_tied:
            self._tie_copy_(new, memo)
        # A later layer of the group may have been copied before: it now reads positions here.
        copied_before = memo.get(_copied_without(self))
        if copied_before is not None:
            copied_before.tie_(new)
        return new

    def _tie_copy_(self, new: Self, memo: dict[Any, Any]) -> None:
        """Tie a copy of this tied layer to the copy of the first one, or give it positions."""
        (first,) = self._tied_to
        new_first = memo.get(id(first), memo.get(_copied_without(first)))
        if new_first is not None:
            new._tied_to = (new_first,)
            return
        memo[_copied_without(first)] = new
        for name in POSITION_PARAMETERS:
            new.register_parameter(name, copy.deepcopy(getattr(first, name), memo))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change the layer's tensors, as `to`, `cuda`, `half` and so on do.

        `fn` gets flat tensors, since `to(memory_format=channels_last)` fails for five axes.
        Positions and sigma are in float32 at least afterwards, whatever they were before.
        """
        exact = set[int]()  # ids of positions, sigma and their gradients
        for name in POSITION_PARAMETERS:
            parameter = self._parameters.get(name)
            if parameter is not None:
                exact |= {id(parameter), id(parameter.grad)}

        def change(tensor: Tensor) -> Tensor:
            if is_sharded(tensor):
                return fn(tensor)
            flat = tensor.flatten()
            changed = fn(flat)
            if id(tensor) in exact and changed.dtype != at_least_float32(changed.dtype):
                changed = flat.to(changed.device, at_least_float32(flat.dtype))
            if changed is flat:
                # The tensor itself: torch.utils.swap_tensors refuses a view of it.
                return tensor
            return changed.view(tensor.shape)

        super()._apply(change, recurse)  # type: ignore[no-untyped-call]
        return self


def _copied_without(first: Tieable) -> tuple[str, int]:
    """Return the key, in deepcopy's memo, of the copy that got the positions of `first`.

    It got them because `first` was not copied before.
    """
    return ("copied without", id(first))
