"""Tell whole networks in numbered containers, as of an ensemble, from blocks of one network.

A network takes the user's inputs, or a picture. A block takes the result of another block. So,
while the model runs, the first call inside each module is noted, with its tensors.
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

# Most channels of a picture or a waveform. Small networks have blocks of four channels.
PICTURE_CHANNELS = 3


@dataclass(slots=True)
class Beginnings:
    """The tensors of the first call inside each module of a network, during a trace."""

    inputs: dict[Tensor, int] = field(default_factory=dict)  # input -> its latest version
    called: set[str] = field(default_factory=set)  # paths inside which a module was called
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

    def note_inputs(
        self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the inputs of the network."""
        for tensor in tensors_in([args, kwargs]):
            self.inputs[tensor] = _version(tensor)

    def is_input(self, tensor: Tensor) -> bool:
        """True for an input of the network that nothing has changed in place."""
        return tensor in self.inputs and self.inputs[tensor] == _version(tensor)

    def note_call(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note the tensors of a call, for the module of this path and the modules that hold it."""
        if self.conv_was_called and (not path or path in self.called):
            return
        tensors: list[Tensor] = list(filter(torch.is_tensor, tree_leaves((args, kwargs))))
        if not tensors:
            return
        if not self.conv_was_called:  # up to the first convolution, tensors count as inputs
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
    """True for vectors, and for maps with few channels on the second or the last axis."""
    return tensor.dim() < 3 or min(tensor.shape[1], tensor.shape[-1]) <= PICTURE_CHANNELS


def _version(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place, if torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def whole_networks(
    convs: Mapping[str, AnyConv], begin_with_input: Set[str], begin_with_picture: Set[str]
) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if at least two of them take inputs of the network,
    or a picture whose channels their first convolution widens. Of the blocks of one network, only
    the first takes them. A child with a single convolution is a layer, as in a stem of branches.

    Args:
        convs: Convolutions by name, in the order of their first calls.
        begin_with_input: Paths of modules whose first call (of the module or of a module inside it)
            takes only inputs of the network.
        begin_with_picture: Paths of modules whose first call takes only inputs of the network and
            tensors that may be pictures.
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

    The convolutions are assumed to be called in the order of their definition, the first one on the
    input.
    """
    all_paths = {path for name in convs for path in paths_above(name)}
    first = next(iter(convs), "")
    return whole_networks(convs, set(paths_above(first)), all_paths)


def paths_above(name: str) -> list[str]:
    """Return the paths of the modules that hold a module: "a.0.conv" -> "a", "a.0"."""
    return list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))


def _widen_a_picture(convs: Mapping[str, AnyConv]) -> set[str]:
    """Return the names of the convolutions that take a picture and have more output channels.

    A map of few channels is a picture if earlier maps have more channels. In a narrow network, all
    maps have few channels.
    """
    names: set[str] = set()
    widest = 0  # most output channels of the earlier convolutions
    for name, conv in convs.items():
        sees_picture = conv.in_channels <= PICTURE_CHANNELS and conv.in_channels < widest
        if sees_picture and conv.groups == 1 and conv.in_channels < conv.out_channels:
            names.add(name)
        widest = max(widest, conv.out_channels)
    return names
