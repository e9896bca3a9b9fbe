"""Open the network that a request names: what is known before its weights are there.

There are three ways in. Each is a class that says how the network is built, with which weights, and
what a folder will call it.
"""

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager
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
from ..running.model_state import unchanged_on_failure
from ..weights.loading import build_and_load, load_weights_
from .request import NetworkRequest, RequestWeights
from .request_weights import classes_of_weights, read_request_weights


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """The user's network in memory, which is converted itself."""

    structure: nn.Module  # the network
    name: str  # for messages

    @property
    def source(self) -> ModelSource | None:
        """What builds it again, for a folder; None if only the user's code can."""
        return stated_source(self.structure)

    def build(
        self, weights: RequestWeights | None, lacking: Collection[str], notify: Notify
    ) -> nn.Module:
        """Return the network, with the weights if there are any (see `FromLibrary.build`)."""
        if weights is not None:
            load_weights_(self.structure, weights.entries, weights.where, optional=lacking)
        return self.structure

    def unchanged_on_failure(self, weights: RequestWeights | None) -> AbstractContextManager[None]:
        """Restore the network if the block fails, with its values if weights are loaded."""
        values = []
        if weights is not None:
            values = [*self.structure.parameters(), *self.structure.buffers()]
        return unchanged_on_failure(self.structure, values=values)


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A network that is built by its name; nobody else has it."""

    request: NetworkRequest
    built_by: ModelSource
    structure: nn.Module  # without the weights

    @property
    def name(self) -> str:
        return self.built_by.name

    def unchanged_on_failure(self, weights: RequestWeights | None) -> AbstractContextManager[None]:
        """Do nothing: after a failure, the network is gone."""
        return contextlib.nullcontext()

    def _finished(self, network: nn.Module) -> nn.Module:
        """Return a network that has its values, on the device where it is converted."""
        if not self.request.pretrained:
            forget_origin_(network)  # the weights are not those of timm that its config states
        if self.request.device is not None:
            network = network.to(self.request.device)
        return network


@dataclass(frozen=True, kw_only=True)
class FromUserCode(_Named):
    """A network that the user's own code builds; it runs once, and gives the values, too."""

    @property
    def source(self) -> ModelSource | None:
        return self.built_by

    def build(
        self, weights: RequestWeights | None, lacking: Collection[str], notify: Notify
    ) -> nn.Module:
        """Return the network, with the weights if there are any (see `FromLibrary.build`)."""
        if weights is not None:
            load_weights_(self.structure, weights.entries, weights.where, optional=lacking)
        return self._finished(self.structure)


@dataclass(frozen=True, kw_only=True)
class FromLibrary(_Named):
    """A network of timm or torchvision, of the hub or in timm's format: on meta, then built."""

    @property
    def source(self) -> ModelSource | None:
        """What builds it again, for a folder; None if nothing does."""
        if self.built_by.prefix in OTHER_TIMM_PREFIXES:
            return stated_source(self.structure)
        return self.built_by

    def build(
        self, weights: RequestWeights | None, lacking: Collection[str], notify: Notify
    ) -> nn.Module:
        """Return the network with its values.

        Args:
            weights: The weights to load; None for pretrained or random ones.
            lacking: Names of tensors that the weights may lack.
            notify: Called with what is being done.

        Raises:
            CheckpointError: The weights do not fit.
            ModelError: The model cannot be built.
        """
        seed = self.request.seed
        if weights is None:
            pretrained = " with pretrained weights" if self.request.pretrained else ""
            notify(f"building{pretrained}")
            network = build_model(
                self.built_by, pretrained=self.request.pretrained, seed=seed, trust_code=True
            )
        else:
            notify("building")
            network = build_and_load(
                self.built_by, weights.entries, weights.where, seed=seed, optional=lacking
            )
        return self._finished(network)


Network = InMemory | FromUserCode | FromLibrary


def open_network(
    request: NetworkRequest, *, offline: bool, notify: Notify, note: Note
) -> tuple[Network, RequestWeights | None]:
    """Open a network without its values, and read the weights that the request states.

    If the request names the user's own code as the model, that code is run.

    Args:
        request: The network.
        offline: Download nothing.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        DclsConvertError: The model or the weights cannot be read, or do not fit each other.
    """
    network: Network
    if isinstance(request.model, nn.Module):
        network = InMemory(structure=request.model, name=type(request.model).__name__)
    else:
        network = _open_named(request, _stated_source(request, request.model), offline=offline)
    if request.weights is None:
        return network, None
    weights = read_request_weights(request, network.structure, notify, note)
    classes = classes_of_weights(request, network.structure, weights)
    if classes is None:
        return network, weights
    if not isinstance(network, FromLibrary):
        raise CheckpointError(
            f"{weights.where}: its classifier is for another number of classes than the model's; "
            f"build the model with {classes} classes"
        )
    note(
        f"{weights.where}: has {classes:,} classes, so the model is built with that many; "
        "state a number of classes if you want a new classifier"
    )
    built_by = replace(network.built_by, args={**network.built_by.args, "num_classes": classes})
    return _open_named(request, built_by, offline=offline), weights


def _stated_source(request: NetworkRequest, name: str) -> ModelSource:
    source = resolve_model(
        name,
        num_classes=request.num_classes,
        in_chans=request.in_chans,
        model_kwargs=request.model_kwargs,
        pretrained=request.pretrained,
    )
    if source.is_from_registry:
        check_source(source)  # or the folder could not be loaded
    return source


def _open_named(
    request: NetworkRequest, source: ModelSource, *, offline: bool
) -> FromUserCode | FromLibrary:
    """Build the structure: on meta, or with values, because the network is measured.

    Measured are networks of the user's own code, and those of timm that return features by hooks.
    """

    def build(device: str) -> nn.Module:
        return build_model(
            source, device=device, seed=request.seed, offline=offline, trust_code=True
        )

    if source.prefix not in LIBRARY_PREFIXES:
        return FromUserCode(request=request, built_by=source, structure=build("cpu"))
    structure = build("meta")
    if not is_library_code(structure):
        structure = build("cpu")
    return FromLibrary(request=request, built_by=source, structure=structure)


def find_convs_of(network: Network, request: NetworkRequest) -> ModelConvs:
    """Return the network's convolutions, with sizes, MACs, and what was measured of them."""
    inputs = inputs_of(network.structure, request.input_size, request.example_inputs)
    if inputs is None and network.source is not None:
        inputs = assumed_inputs(network.source, network.structure)
    return find_convs_for(network.structure, inputs)
