"""Rename weights from files and training frameworks to the network's own names."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..networks.wrappers import by_plain_name
from ..progress import Note, ignore_messages
from ..text import short_list
from .loading import classifier_prefixes

MAX_PREFIX_PARTS = 8  # components of a prefix to try; bounds the work for names with many dots
# A prefix is tried only if at least this share of the model's number of tensors has it.
MIN_SHARE = 0.5


def rename_to_model(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    where: str = "the state dict",
    note: Note = ignore_messages,
) -> dict[str, Tensor]:
    """Rename the entries of a state dict to the model's names.

    Names that wrappers add, such as "_orig_mod.", are removed. A common prefix of the model's
    tensors, such as "module." from DistributedDataParallel or "model." from Lightning, is removed,
    too. Original names of weights that timm downloads are translated by timm's function for the
    model. Files of other programs may lack BatchNorm's `num_batches_tracked`; inference does not
    use this count, so 0 is filled in.

    Args:
        model: The network; its state dict has the wanted names.
        state: Weights under any names. Names are kept if no renaming makes more of them fit.
        where: What messages call the state dict.
        note: Called with a line about a prefix that is removed.

    Raises:
        CheckpointError: Several prefixes fit equally well.
    """
    own_names = model.state_dict().keys()
    if own_names == state.keys():
        return dict(state)
    renamed = _without_prefix(model, by_plain_name(state.items()), own_names, where, note)
    for name in own_names - renamed.keys():
        layer, _, entry = name.rpartition(".")
        if entry == "num_batches_tracked" and f"{layer}.running_mean" in renamed:
            renamed[name] = torch.tensor(0)
    return renamed


def _without_prefix(
    model: nn.Module,
    state: Mapping[str, Tensor],
    own_names: AbstractSet[str],
    where: str,
    note: Note,
) -> dict[str, Tensor]:
    """Return the entries under the prefix without which most names are the model's."""
    candidates: dict[str, Mapping[str, Tensor]] = {}
    for prefix in ("", *_frequent_prefixes(state, MIN_SHARE * len(own_names))):
        bare: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.startswith(prefix):
                bare[name.removeprefix(prefix)] = tensor
        candidates[prefix] = _translated_by_timm(model, bare, own_names)
    # Do not count classifier names: of two networks in a file, the one without a classifier must
    # still be found.
    classifier = classifier_prefixes(model)
    wanted = {name for name in own_names if not name.startswith(classifier)} or own_names
    known = {prefix: len(wanted & names.keys()) for prefix, names in candidates.items()}
    best = max(known, key=known.__getitem__)  # the shortest if several are equal
    equal = [prefix for prefix in known if known[prefix] == known[best]]
    rivals = [prefix for prefix in equal if not prefix.startswith(best)]
    if rivals:
        raise CheckpointError(
            f"{where}: holds several networks, under {short_list([best, *rivals], 8)}; "
            "name one as checkpoint key"
        )
    if best:
        text = f"{where}: removes the prefix {best!r} from its names"
        others = [name for name in state if not name.startswith(best)]
        if others:
            text += f"; ignored, because they lack it: {short_list(others)}"
        note(text)
    return dict(candidates[best])


def _frequent_prefixes(names: Iterable[str], min_count: float) -> list[str]:
    """Return the prefixes that at least `min_count` names have, from short to long."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".", MAX_PREFIX_PARTS)
        for length in range(1, len(parts)):
            counts[".".join(parts[:length]) + "."] += 1
    return sorted((prefix for prefix in counts if counts[prefix] >= min_count), key=len)


def _translated_by_timm(
    model: nn.Module, state: dict[str, Tensor], own_names: AbstractSet[str]
) -> Mapping[str, Tensor]:
    """Return the state dict, renamed by timm's function for the model if more names then fit."""
    module = sys.modules.get(type(model).__module__)
    translate = getattr(module, "checkpoint_filter_fn", None)
    if translate is None or not type(model).__module__.startswith("timm."):
        return state
    # The function may fail on names that it does not know; loading then says what does not fit.
    with contextlib.suppress(Exception):
        translated: dict[str, Tensor] = translate(dict(state), model)
        fits_better = len(own_names ^ translated.keys()) < len(own_names ^ state.keys())
        if fits_better and not any(tensor.is_meta for tensor in translated.values()):
            return translated
    return state
