"""Load what a request names: the network's source, its structure, and its weights."""

import functools
from collections.abc import Collection, Mapping
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
from ..networks.timm_notes import replace_stated_cfg_, stated_source
from ..networks.torchvision_inputs import assumed_inputs
from ..progress import Note, Notify, ignore_messages
from ..running.library_code import is_library_code
from ..text import short_list
from ..weights.files import read_weights
from ..weights.loading import (
    alias_names,
    build_and_load,
    classifier_prefixes,
    differing_classifier,
    differing_num_classes,
    load_weights_,
)
from ..weights.state_names import rename_to_model
from .authors import split_authors_elements
from .request import ConversionRequest, RequestWeights, options_without_effect


@dataclass(frozen=True, kw_only=True)
class LoadedNetwork:
    """The network of a request, without its values, and the weights that the request states."""

    request: ConversionRequest
    source: ModelSource | None  # how it is built; None for a model in memory
    # How it is built again from its folder; None if only the user's code can build it.
    source_in_folder: ModelSource | None
    # The network itself, if it is in memory or only the user's code builds it; else on meta.
    structure: nn.Module
    convs: ModelConvs  # traced at the input size
    weights: RequestWeights | None

    @property
    def authors_weights(self) -> RequestWeights | None:
        """The weights, if they have elements of the authors' layers."""
        if self.weights is None or not self.weights.elements:
            return None
        return self.weights


def load(
    request: ConversionRequest, *, notify: Notify = ignore_messages, note: Note = ignore_messages
) -> LoadedNetwork:
    """Load a request's network without its values, and the weights that the request states.

    If the request names the user's own code as the model, that code is run.

    Args:
        request: The request.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        DclsConvertError: The model or the weights cannot be loaded, or do not fit each other.
    """
    for sentence in options_without_effect(request):
        note(sentence)
    source = _stated_source(request)
    structure = _structure(request, source)
    weights = None
    if request.weights is not None:
        weights = _read_weights(request, structure, notify, note)
        classes = _classes_of_weights(request, source, structure, weights)
        if classes is not None and source is not None:
            note(
                f"{weights.where}: has {classes:,} classes, so the model is built with that many; "
                "state a number of classes if you want a new classifier"
            )
            source = replace(source, args={**source.args, "num_classes": classes})
            structure = _structure(request, source)
    source_in_folder = source
    if source is None or source.prefix in OTHER_TIMM_PREFIXES:
        source_in_folder = stated_source(structure)
    inputs = inputs_of(structure, request.input_size, request.example_inputs)
    if inputs is None and source_in_folder is not None:
        inputs = assumed_inputs(source_in_folder, structure)
    notify("finding convolutions")
    return LoadedNetwork(
        request=request,
        source=source,
        source_in_folder=source_in_folder,
        structure=structure,
        convs=find_convs_for(structure, inputs),
        weights=weights,
    )


def _stated_source(request: ConversionRequest) -> ModelSource | None:
    if not isinstance(request.model, str):
        return None
    source = resolve_model(
        request.model,
        num_classes=request.num_classes,
        in_chans=request.in_chans,
        model_kwargs=request.model_kwargs,
        pretrained=request.pretrained,
    )
    if source.is_from_registry:
        check_source(source)  # or the checkpoint could not be loaded
    return source


def _structure(request: ConversionRequest, source: ModelSource | None) -> nn.Module:
    if source is None:
        assert not isinstance(request.model, str)
        return request.model
    build = functools.partial(
        build_model, source, seed=request.seed, offline=request.dry_run, trust_code=True
    )
    if source.prefix in LIBRARY_PREFIXES:
        structure = build(device="meta")
        if is_library_code(structure):
            return structure
    # Built with values, because the network is measured: one of the user's own code, or one of timm
    # that returns features by hooks.
    return build()


def _read_weights(
    request: ConversionRequest, structure: nn.Module, notify: Notify, note: Note
) -> RequestWeights:
    assert request.weights is not None
    notify("reading weights")
    where = f"weights file {request.weights}"
    if isinstance(request.weights, Mapping):
        where = "the state dict"
    state = read_weights(request.weights, key=request.checkpoint_key, note=note)
    entries = rename_to_model(structure, state, where=where, note=note)
    new_classifier: list[str] = []
    if request.num_classes is not None:
        new_classifier = differing_classifier(structure, entries)
        _note_new_classifier(structure, new_classifier, note)
    for name in new_classifier:
        entries.pop(name, None)
    elements, others = split_authors_elements(entries)
    return RequestWeights(
        where=where, elements=elements, entries=others, new_classifier=new_classifier
    )


def _note_new_classifier(structure: nn.Module, names: Collection[str], note: Note) -> None:
    """Note which of a classifier's tensors are new, and which in the file are unused."""
    own_names = structure.state_dict().keys()
    new = [name for name in names if name in own_names]
    unused = [name for name in names if name not in own_names]
    if new:
        note(f"no weights fit the classifier, which starts from random values: {short_list(new)}")
    if unused:
        note(f"the classifier in the weights is left out: {short_list(unused)}")


def _classes_of_weights(
    request: ConversionRequest,
    source: ModelSource | None,
    structure: nn.Module,
    weights: RequestWeights,
) -> int | None:
    """Return the weights' number of classes, if it differs from the model's and none is stated.

    Raises:
        CheckpointError: The numbers differ, but the model is in memory or built by the user's own
            code, so it cannot be rebuilt with another number. Or the classifiers have other names.
    """
    if request.num_classes is not None:
        return None
    own_names = structure.state_dict().keys()
    differing = sorted((own_names ^ weights.entries.keys()) - alias_names(structure).keys())
    prefixes = classifier_prefixes(structure)
    if differing and all(name.startswith(prefixes) for name in differing):
        raise CheckpointError(
            f"{weights.where}: its classifier has other tensors than the model's: "
            f"{short_list(differing)}; state the number of classes for a new one, or 0 for none"
        )
    classes = differing_num_classes(structure, weights.entries)
    if classes is not None and (source is None or source.prefix not in LIBRARY_PREFIXES):
        raise CheckpointError(
            f"{weights.where}: its classifier is for another number of classes than the model's; "
            f"build the model with {classes} classes"
        )
    return classes


def build_network(loaded: LoadedNetwork, *, notify: Notify = ignore_messages) -> nn.Module:
    """Return the network with its values: the model in memory itself, or a new one.

    Weights with elements of the authors' layers are not loaded.

    Raises:
        CheckpointError: The weights do not fit.
        ModelError: The model cannot be built.
    """
    request = loaded.request
    source = loaded.source
    if source is None:
        return loaded.structure
    weights = loaded.weights
    if loaded.authors_weights is not None:
        weights = None
    if source.prefix not in LIBRARY_PREFIXES:
        network = loaded.structure
        if weights is not None:
            load_weights_(network, weights.entries, weights.where, optional=weights.new_classifier)
    elif weights is not None:
        notify("building")
        network = build_and_load(
            source,
            weights.entries,
            weights.where,
            seed=request.seed,
            optional=weights.new_classifier,
        )
    else:
        notify("building with pretrained weights" if request.pretrained else "building")
        network = build_model(
            source, pretrained=request.pretrained, seed=request.seed, trust_code=True
        )
    if not request.pretrained:
        # The weights are not timm's, whose tag, licence and address its config states.
        replace_stated_cfg_(network, {})
    if request.device is not None:
        network = network.to(request.device)
    return network
