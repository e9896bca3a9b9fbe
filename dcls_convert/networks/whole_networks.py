"""Tell numbered modules that are whole networks, as of an ensemble, from blocks of one network.

A network begins with what the user gives it, a block with what another block computed:

    members.0.stem(image)      members.1.stem(image)           two networks
    blocks.0.conv(image)       blocks.1.conv(another map)      two blocks
"""

import itertools
from collections.abc import Mapping


def whole_networks(takes_image: Mapping[str, bool]) -> set[str]:
    """Return the paths of the whole networks that lie side by side in numbered containers.

    Children of a container are whole networks if the first convolutions of at least two of them
    take the image. A child with a single convolution is a layer, as in a stem of branches.

    Args:
        takes_image: Of convolutions, by name, in the order of their first calls: whether they see
            an input of the model.
    """
    convs_in: dict[str, list[str]] = {}  # by the path of a module
    for name in takes_image:
        for path in paths_above(name):
            convs_in.setdefault(path, []).append(name)
    networks_in: dict[str, set[str]] = {}  # by the path of the container
    for path, (first, *others) in convs_in.items():
        container, _, number = path.rpartition(".")
        if number.isdigit() and others and takes_image[first]:
            networks_in.setdefault(container, set()).add(path)
    networks: set[str] = set()
    for children in networks_in.values():
        if len(children) > 1:
            networks |= children
    return networks


def paths_above(name: str) -> list[str]:
    """Return the paths of the modules that hold this one: "a.0.conv" -> "a", "a.0"."""
    return list(itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
