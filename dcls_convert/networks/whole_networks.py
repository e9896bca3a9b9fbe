"""Tell numbered modules that are whole networks, as of an ensemble, from blocks of one network.

A network begins with what the user gives it, or with a picture; a block with what another block
computed. So modules note, while the model runs, what is called first inside them, and with what.
"""

import itertools
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..layers.conv_classes import AnyConv
from ..running.compare_outputs import tensors_in

# Channels of a picture or a waveform, at most. Small networks have blocks of four channels.
PICTURE_CHANNELS = 3


@dataclass(slots=True)
class Beginnings:
    """What the modules of a network are called with first, during a trace."""

    inputs: dict[Tensor, int] = field(default_factory=dict)  # and their latest versions
    called: set[str] = field(default_factory=set)  # paths in which something was called
    with_input: set[str] = field(default_factory=set)  # see `whole_networks`
    with_picture: set[str] = field(default_factory=set)
    conv_was_called: bool = False

    def clear(self) -> None:
        """Forget everything."""
        self.inputs.clear()
        self.called.clear()
        self.with_input.clear()
        self.with_picture.clear()
        self.conv_was_called = False

    def take(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the inputs of the network."""
        for tensor in tensors_in([args, kwargs]):
            self.inputs[tensor] = _version(tensor)

    def is_input(self, tensor: Tensor) -> bool:
        """True for an input of the network that nothing has changed in place."""
        return tensor in self.inputs and self.inputs[tensor] == _version(tensor)

    def note(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note what a module is called with, for the module of this path and those that hold it."""
        if self.conv_was_called and (not path or path in self.called):
            return
        tensors: list[Tensor] = list(filter(torch.is_tensor, tree_leaves((args, kwargs))))
        if not tensors:
            return
        if not self.conv_was_called:  # perhaps an input that was prepared
            self.inputs.update(zip(tensors, map(_version, tensors), strict=True))
            self.conv_was_called = isinstance(module, AnyConv)
        others = list(itertools.filterfalse(self.is_input, tensors))
        are_pictures = all(map(_may_be_picture, others))
        while path and path not in self.called:
            self.called.add(path)
            if not others:
                self.with_input.add(path)
            if are_pictures:
                self.with_picture.add(path)
            path = path.rpartition(".")[0]


def _may_be_picture(tensor: Tensor) -> bool:
    """True for a map of few channels, which lie on its second axis or its last, and for vectors."""
    return tensor.dim() < 3 or min(tensor.shape[1], tensor.shape[-1]) <= PICTURE_CHANNELS


def _version(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place, if torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def whole_networks(
    convs: Mapping[str, AnyConv], begin_with_input: Set[str], begin_with_picture: Set[str]
) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if at least two of them begin as networks do: on
    inputs, or on a picture, which their first convolution widens. Of the blocks of one network,
    only the first does. A child with a single convolution is a layer, as in a stem of branches.

    Args:
        convs: Convolutions by name, in the order of their first calls.
        begin_with_input: Paths of the modules with others inside in which what is called first
            takes inputs of the network alone: the module itself, or one inside it.
        begin_with_picture: Paths of the modules that take nothing but inputs and what may be
            pictures.
    """
    widening = _widen_a_picture(convs)
    convs_in: dict[str, list[str]] = {}  # by the path of a module
    for name in convs:
        for path in paths_above(name):
            convs_in.setdefault(path, []).append(name)
    networks_in: dict[str, set[str]] = {}  # by the path of the container
    for path, (first, *others) in convs_in.items():
        container, _, number = path.rpartition(".")
        begins = path in begin_with_input or (path in begin_with_picture and first in widening)
        if number.isdigit() and others and begins:
            networks_in.setdefault(container, set()).add(path)
    networks: set[str] = set()
    for children in networks_in.values():
        if len(children) > 1:
            networks |= children
    return networks


def whole_networks_by_definition(convs: Mapping[str, AnyConv]) -> set[str]:
    """Return the paths of the whole networks in a model that was not traced.

    Its convolutions are assumed to be called in the order in which they are defined, the first on
    the input.
    """
    all_paths = {path for name in convs for path in paths_above(name)}
    first = next(iter(convs), "")
    return whole_networks(convs, set(paths_above(first)), all_paths)


def paths_above(name: str) -> list[str]:
    """Return the paths of the modules that hold this one: "a.0.conv" -> "a", "a.0"."""
    return list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))


def _widen_a_picture(convs: Mapping[str, AnyConv]) -> set[str]:
    """Return the names of the convolutions that see a picture and have more output channels.

    A map of few channels is a picture if maps before it were wider: a narrow network is not
    narrowed on its way.
    """
    names: set[str] = set()
    widest = 0  # output channels of the convolutions before
    for name, conv in convs.items():
        sees_picture = conv.in_channels <= PICTURE_CHANNELS and conv.in_channels < widest
        if sees_picture and conv.groups == 1 and conv.in_channels < conv.out_channels:
            names.add(name)
        widest = max(widest, conv.out_channels)
    return names
