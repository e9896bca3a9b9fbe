"""Read the weights that a request states, and give them the names of the network's tensors."""

from collections.abc import Mapping

from torch import nn

from ..errors import CheckpointError
from ..progress import Note, Notify
from ..text import short_list
from ..weights.files import read_weights
from ..weights.loading import (
    alias_names,
    classifier_prefixes,
    differing_classifier,
    differing_num_classes,
)
from ..weights.state_names import rename_to_model
from .authors import split_authors_elements
from .request import NetworkRequest, RequestWeights


def read_request_weights(
    request: NetworkRequest, model: nn.Module, notify: Notify, note: Note
) -> RequestWeights:
    """Read the weights that a request states.

    Args:
        request: The request.
        model: The network for the weights; its values are not used.
        notify: Called with the step that begins.
        note: Called with messages for the user.

    Raises:
        CheckpointError: The weights cannot be read, or their names do not fit the network.
    """
    assert request.weights is not None
    notify("reading weights")
    where = f"weights file {request.weights}"
    if isinstance(request.weights, Mapping):
        where = "the state dict"
    state = read_weights(request.weights, key=request.checkpoint_key, note=note)
    entries = rename_to_model(model, state, where=where, note=note)
    new_classifier: list[str] = []
    if request.num_classes is not None:
        new_classifier = differing_classifier(model, entries)
        own_names = model.state_dict().keys()
        new = [name for name in new_classifier if name in own_names]
        if new:
            note(
                f"no weights fit the classifier, which starts from random values: {short_list(new)}"
            )
    for name in new_classifier:
        entries.pop(name, None)
    elements, others = split_authors_elements(entries)
    return RequestWeights(
        where=where, elements=elements, entries=others, new_classifier=new_classifier
    )


def classes_of_weights(
    request: NetworkRequest, model: nn.Module, weights: RequestWeights
) -> int | None:
    """Return the weights' number of classes, if it is not the model's and the request states none.

    Raises:
        CheckpointError: The classifier's tensors have other names than the model's.
    """
    if request.num_classes is not None:
        return None
    own_names = model.state_dict().keys()
    differing = sorted((own_names ^ weights.entries.keys()) - alias_names(model).keys())
    prefixes = classifier_prefixes(model)
    if differing and all(name.startswith(prefixes) for name in differing):
        raise CheckpointError(
            f"{weights.where}: its classifier has other tensors than the model's: "
            f"{short_list(differing)}; state the number of classes for a new one, or 0 for none"
        )
    return differing_num_classes(model, weights.entries)
