"""Tell numbered modules that are whole networks, as of an ensemble, from blocks of one network.

A network begins with what the user gives it, a block with what another block computed. So modules
note, while the model runs, what is called first inside them, and with which tensors.
"""

import itertools
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..layers.conv_classes import AnyConv


@dataclass(slots=True)
class Beginnings:
    """What the modules of a network are called with first, during a trace."""

    # What the network is called with, and all that is computed before its first convolution is
    # called: an input that was prepared.
    inputs: set[Tensor] = field(default_factory=set)
    called: set[str] = field(default_factory=set)  # paths of modules in which something was called
    # Those of them in which what was called first took inputs alone: the module, or one inside it.
    with_input: set[str] = field(default_factory=set)
    conv_was_called: bool = False

    def clear(self) -> None:
        """Forget everything."""
        self.inputs.clear()
        self.called.clear()
        self.with_input.clear()
        self.conv_was_called = False

    def note(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note what a module is called with, for the module of this path and those that hold it."""
        if self.conv_was_called and (not path or path in self.called):
            return
        tensors: list[Tensor] = list(filter(torch.is_tensor, tree_leaves((args, kwargs))))
        if not tensors:
            return
        if not self.conv_was_called:
            self.inputs.update(tensors)
            self.conv_was_called = isinstance(module, AnyConv)
        takes_inputs = self.inputs.issuperset(tensors)
        while path and path not in self.called:
            self.called.add(path)
            if takes_inputs:
                self.with_input.add(path)
            path = path.rpartition(".")[0]


def whole_networks(names: Iterable[str], begin_with_input: Set[str]) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if at least two of them begin with inputs: of the
    blocks of one network, only the first does. A child with a single convolution is a layer, as in
    a stem of branches.

    Args:
        names: Of the convolutions.
        begin_with_input: Paths of modules; see `Beginnings.with_input`.
    """
    convs_in: dict[str, int] = {}  # by the path of a module
    for name in names:
        for path in paths_above(name):
            convs_in[path] = convs_in.get(path, 0) + 1
    networks_in: dict[str, set[str]] = {}  # by the path of the container
    for path, count in convs_in.items():
        container, _, number = path.rpartition(".")
        if number.isdigit() and count > 1 and path in begin_with_input:
            networks_in.setdefault(container, set()).add(path)
    networks: set[str] = set()
    for children in networks_in.values():
        if len(children) > 1:
            networks |= children
    return networks


def paths_above(name: str) -> list[str]:
    """Return the paths of the modules that hold this one: "a.0.conv" -> "a", "a.0"."""
    return list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
