"""Tell numbered modules that are whole networks, as of an ensemble, from blocks of one network."""

import itertools
from collections.abc import Mapping, Set

from ..layers.conv_classes import AnyConv

# Channels of a picture or a waveform, at most. Small networks have blocks of four channels.
PICTURE_CHANNELS = 3


def whole_networks(
    convs: Mapping[str, AnyConv], begin_with_input: Set[str], begin_with_picture: Set[str]
) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if at least two of them begin as networks do: on
    inputs, or on a picture, which their first convolution widens. Of the blocks of one network,
    only the first does. A child with a single convolution is a layer, as in a stem of branches.

    Args:
        convs: Convolutions by name, in the order of their first calls.
        begin_with_input: Paths of the modules that take inputs alone; see `Trace`.
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
