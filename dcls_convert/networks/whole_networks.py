"""Tell numbered modules that are whole networks, as of an ensemble, from blocks of one network."""

from collections.abc import Iterator, Mapping, Set

from ..layers.conv_classes import AnyConv

PICTURE_CHANNELS = 3  # of a picture or a waveform, at most; networks of 4 are common in tests


def whole_networks(convs: Mapping[str, AnyConv], begin_with_input: Set[str]) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if at least two of them begin as networks do: on
    inputs, or with a convolution that widens a picture. Of the blocks of one network, only the
    first does. A child with a single convolution is a layer, such as a branch of a stem.

    Args:
        convs: Convolutions by name, in the order of their first calls.
        begin_with_input: Paths of the modules, convolutions too, whose first call takes inputs.
    """
    begin_a_network = begin_with_input | _widen_a_picture(convs)
    convs_in: dict[str, list[str]] = {}  # by the path of a module
    for name in convs:
        for path in paths_above(name):
            convs_in.setdefault(path, []).append(name)
    networks_in: dict[str, set[str]] = {}  # by the path of the container
    for path, (first, *others) in convs_in.items():
        container, _, number = path.rpartition(".")
        if number.isdigit() and others and not begin_a_network.isdisjoint((path, first)):
            networks_in.setdefault(container, set()).add(path)
    networks: set[str] = set()
    for children in networks_in.values():
        if len(children) > 1:
            networks |= children
    return networks


def paths_above(name: str) -> Iterator[str]:
    """Yield the paths of the modules that hold this one: "a.0.conv" -> "a", "a.0"."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


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
