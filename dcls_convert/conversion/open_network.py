"""Open the network that a request names, to examine it before its weights are loaded.

There are three kinds of networks: in memory, built by the user's code, and built by a library. For
each kind, `OpenNetwork` has the module to examine, the source that builds the network with its
values, and the source that a folder states.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import nn

from ..errors import CheckpointError
from ..networks.building import build_model
from ..networks.find_convs import find_convs_for, inputs_of
from ..networks.sites import ModelConvs
from ..networks.source import (
    LIBRARY_PREFIXES,
    OTHER_TIMM_PREFIXES,
    ModelSource,
    check_source,
    resolve_model,
)
from ..networks.timm_notes import forget_origin_, stated_source
from ..networks.torchvision_inputs import assumed_inputs
from ..progress import Note, Notify
from ..running.library_code import is_library_code
from ..weights.loading import build_and_load, load_weights_
from .request import NetworkRequest, RequestWeights
from .request_weights import classes_of_weights, read_request_weights


@dataclass(frozen=True, kw_only=True)
class OpenNetwork:
    """A network that can be examined, and gets its values later."""

    name: str  # heading of a sweep
    # The module to examine: the network itself, with values; or, for most networks of a library,
    # the same network on the meta device.
    examined: nn.Module
    # The source that a folder states; None if only the user's code can build the network.
    source: ModelSource | None
    # The source that builds the network with its values; None if `examined` has the values.
    built_by: ModelSource | None


def _in_memory(model: nn.Module) -> OpenNetwork:
    """Open the user's network in memory, which will be converted in place."""
    name = type(model).__name__
    return OpenNetwork(name=name, examined=model, source=stated_source(model), built_by=None)


def _from_user_code(source: ModelSource, seed: int) -> OpenNetwork:
    """Run the user's code, once: it builds the network with its values."""
    model = build_model(source, seed=seed, trust_code=True)
    return OpenNetwork(name=source.name, examined=model, source=source, built_by=None)


def _from_library(source: ModelSource, seed: int, *, offline: bool) -> OpenNetwork:
    """Open a network of timm, torchvision or the hub, or a folder in timm's format, on meta.

    Only library code is examined on meta. Other networks, such as timm's feature extractors with
    hooks, are built with values, because they must be measured.
    """
    build = functools.partial(build_model, source, seed=seed, offline=offline, trust_code=True)
    examined = build(device="meta")
    if not is_library_code(examined):
        examined = build()
    stated: ModelSource | None = source
    if source.prefix in OTHER_TIMM_PREFIXES:
        stated = stated_source(examined)
    return OpenNetwork(name=source.name, examined=examined, source=stated, built_by=source)


def open_network(
    request: NetworkRequest, *, offline: bool, notify: Notify, note: Note
) -> tuple[OpenNetwork, RequestWeights | None]:
    """Open a network without its values, and read the weights that the request states.

    If the request names the user's own code as the model, that code is run.

    Args:
        request: The network.
        offline: Download nothing.
        notify: Called with the step that begins.
        note: Called with messages for the user.

    Raises:
        DclsConvertError: The model or the weights cannot be read, or do not fit each other.
    """
    if isinstance(request.model, nn.Module):
        network = _in_memory(request.model)
    else:
        network = _open_named(request, _stated_source(request, request.model), offline=offline)
    if request.weights is None:
        if request.checkpoint_key is not None:
            note("the checkpoint key has no effect without a weights file")
        return network, None
    weights = read_request_weights(request, network.examined, notify, note)
    classes = classes_of_weights(request, network.examined, weights)
    if classes is None:
        return network, weights
    source = network.built_by
    if source is None:
        raise CheckpointError(
            f"{weights.where}: its classifier is for another number of classes than the model's; "
            f"build the model with {classes} classes"
        )
    note(
        f"{weights.where}: has {classes:,} classes, so the model is built with that many; "
        "state a number of classes if you want a new classifier"
    )
    source = replace(source, args={**source.args, "num_classes": classes})
    return _open_named(request, source, offline=offline), weights


def _stated_source(request: NetworkRequest, name: str) -> ModelSource:
    source = resolve_model(
        name,
        num_classes=request.num_classes,
        in_chans=request.in_chans,
        model_kwargs=request.model_kwargs,
        pretrained=request.pretrained,
    )
    if source.is_from_registry:
        check_source(source)  # a source that is refused could not be loaded from a folder
    return source


def _open_named(request: NetworkRequest, source: ModelSource, *, offline: bool) -> OpenNetwork:
    if source.prefix in LIBRARY_PREFIXES:
        return _from_library(source, request.seed, offline=offline)
    return _from_user_code(source, request.seed)


def examine(network: OpenNetwork, request: NetworkRequest) -> ModelConvs:
    """Return the network's convolutions, with their sizes, MACs and measured dependence."""
    inputs = inputs_of(network.examined, request.input_size, request.example_inputs)
    if inputs is None and network.source is not None:
        inputs = assumed_inputs(network.source, network.examined)
    return find_convs_for(network.examined, inputs)


def give_values_(
    network: OpenNetwork,
    request: NetworkRequest,
    weights: RequestWeights | None,
    *,
    lacking: Collection[str] = (),
    notify: Notify,
) -> nn.Module:
    """Return the network with its values.

    A network in memory, or built by the user's code, is changed in place. A network of a library is
    built again, with its values.

    Args:
        network: The network.
        request: The request for which the network was opened.
        weights: The weights to load; None for pretrained or random weights, or weights in memory.
        lacking: Names of tensors that the weights may lack.
        notify: Called with the step that begins.

    Raises:
        CheckpointError: The weights do not fit.
        ModelError: The model cannot be built.
    """
    source = network.built_by
    if source is None:
        model = network.examined
        if weights is not None:
            load_weights_(model, weights.entries, weights.where, optional=lacking)
    elif weights is not None:
        notify("building")
        model = build_and_load(
            source, weights.entries, weights.where, seed=request.seed, optional=lacking
        )
    else:
        notify("building with pretrained weights" if request.pretrained else "building")
        model = build_model(
            source, pretrained=request.pretrained, seed=request.seed, trust_code=True
        )
    is_in_memory = isinstance(request.model, nn.Module)
    if weights is not None or not (is_in_memory or request.pretrained):
        forget_origin_(model)  # the config states timm's weights, which the model does not have
    if request.device is not None:
        model = model.to(request.device)
    return model
