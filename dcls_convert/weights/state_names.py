"""Translate the names of weights in files and from trainers into the network's own."""

import contextlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..networks.wrappers import WRAPPER_NAMES
from ..progress import Note, ignore_messages
from ..text import short_list
from .loading import CONVERTED_ENTRY, classifier_prefixes

MAX_PREFIX_PARTS = 8  # components of a prefix that is tried; bounded because a name can have any
FLATTENED = re.compile(r"^(\w+)_([0-9]+)\.")  # beginning of a name in a `features_only` network
# Least share of the model's number of tensors under a prefix that is tried.
MIN_SHARE_UNDER_PREFIX = 0.5


def rename_to_model(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    where: str = "the state dict",
    note: Note = ignore_messages,
) -> dict[str, Tensor]:
    """Rename the entries of a state dict to the model's names.

    Names that wrappers add are removed, such as "_orig_mod.". So is a common prefix of the model's
    tensors, such as "module." from DistributedDataParallel or "model." from Lightning.
    Original names of weights that timm downloads are translated by timm's function for the model.
    Files of other programs may lack BatchNorm's `num_batches_tracked`; inference does not use it,
    so 0 is filled in. Tensors outside the model are left out, see `_without_outsiders`.

    Args:
        model: Its state dict has the names wanted.
        state: Weights under any names, which stay as they are if nothing fits better.
        where: What messages call the state dict.
        note: Called with a line about each thing that is removed.

    Raises:
        CheckpointError: Several prefixes fit equally well.
    """
    own_names = model.state_dict().keys()
    if own_names == state.keys():
        return dict(state)
    state = _without_wrapper_names(state, own_names, where, note)
    prefix, best = _best_names(model, state, own_names, where)
    if prefix:
        note(_prefix_note(where, prefix, state))
    renamed = _with_own_spelling(best, own_names, where, note)
    for name in own_names - renamed.keys():
        layer, _, entry = name.rpartition(".")
        if entry == "num_batches_tracked" and f"{layer}.running_mean" in renamed:
            renamed[name] = torch.tensor(0)
    return _without_outsiders(model, renamed, where, note)


def _without_wrapper_names(
    state: Mapping[str, Tensor], own_names: Collection[str], where: str, note: Note
) -> Mapping[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    removed: dict[str, None] = {}
    for name, tensor in state.items():
        new_name = name
        if name not in own_names:
            removed.update(dict.fromkeys(WRAPPER_NAMES.findall(name)))
            new_name = WRAPPER_NAMES.sub("", name)
        renamed[new_name] = tensor
    if not removed or len(renamed) < len(state):
        return state
    note(f"{where}: removes {short_list(removed)} from its names")
    return renamed


def _with_own_spelling(
    state: Mapping[str, Tensor], own_names: Collection[str], where: str, note: Note
) -> dict[str, Tensor]:
    """Rename entries of parts that were in DataParallel, or in timm's `features_only` networks.

    The first have names such as "features.module.0.weight", the others "stages_0.weight".
    """
    renamed: dict[str, Tensor] = {}
    changes: list[str] = []
    for name, tensor in state.items():
        new_name = name
        if name not in own_names:
            for spelling in (name.replace(".module.", "."), FLATTENED.sub(r"\1.\2.", name)):
                if spelling in own_names and spelling not in state:
                    new_name = spelling
                    changes.append(f"{name} to {spelling}")
        renamed[new_name] = tensor
    if changes:
        note(f"{where}: renames {short_list(changes, 1)}")
    return renamed


def _best_names(
    model: nn.Module, state: Mapping[str, Tensor], own_names: Collection[str], where: str
) -> tuple[str, Mapping[str, Tensor]]:
    """Find the prefix without which most names are the model's.

    Returns:
        The prefix, "" for none, and the renamed entries.
    """
    # Two networks that differ in the classifier alone are two networks.
    classifier = classifier_prefixes(model)
    wanted = [name for name in own_names if not name.startswith(classifier)] or own_names
    best_prefix = ""
    best = _translated_by_timm(model, state, own_names)
    equal_prefixes: list[str] = []
    for prefix, bare in _entries_by_prefix(state, MIN_SHARE_UNDER_PREFIX * len(own_names)):
        translated = _translated_by_timm(model, bare, own_names)
        better_by = _count_known(translated, wanted) - _count_known(best, wanted)
        if better_by > 0:
            best_prefix = prefix
            best = translated
            equal_prefixes = [prefix]
        elif better_by == 0 and best_prefix and not prefix.startswith(best_prefix):
            equal_prefixes.append(prefix)
    if len(equal_prefixes) > 1:
        raise CheckpointError(
            f"{where}: holds several networks, under {short_list(equal_prefixes, 8)}; "
            "name one as checkpoint key"
        )
    return best_prefix, best


def _entries_by_prefix(
    state: Mapping[str, Tensor], least: float
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each prefix of at least so many names, from short to long, with its entries."""
    entries: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        parts = name.split(".", MAX_PREFIX_PARTS)
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length]) + "."
            entries.setdefault(prefix, {})[name.removeprefix(prefix)] = tensor
    for prefix in sorted(entries, key=len):
        if len(entries[prefix]) >= least:
            yield prefix, entries[prefix]


def _without_outsiders(
    model: nn.Module, state: dict[str, Tensor], where: str, note: Note
) -> dict[str, Tensor]:
    """Leave out tensors outside the model, if all of the model's are there, and say so.

    A tensor is outside if its name begins with no module or tensor of the model: a loss, a queue,
    an auxiliary head. Here, the classifier may be missing; loading decides whether that is allowed.
    """
    own_names = model.state_dict().keys()
    if not own_names & state.keys():
        return state
    for name in own_names - state.keys():
        if not name.startswith(classifier_prefixes(model)):
            return state
    inside = {name for name, _ in model.named_children()}
    inside.update(name.partition(".")[0] for name in own_names)
    kept: dict[str, Tensor] = {}
    outside: list[str] = []
    for name, tensor in state.items():
        if name.partition(".")[0] in inside or name.endswith(CONVERTED_ENTRY):
            kept[name] = tensor
        else:
            outside.append(name)
    if outside:
        note(f"{where}: ignored, because the model has no such parts: {short_list(outside)}")
    return kept


def _count_known(names: Iterable[str], own_names: Collection[str]) -> int:
    return len(set(own_names).intersection(names))


def _prefix_note(where: str, prefix: str, names: Iterable[str]) -> str:
    text = f"{where}: removes the prefix {prefix!r} from its names"
    others = [name for name in names if not name.startswith(prefix)]
    if others:
        text += f"; ignored, because they lack it: {short_list(others)}"
    return text


def _translated_by_timm(
    model: nn.Module, state: Mapping[str, Tensor], own_names: Collection[str]
) -> Mapping[str, Tensor]:
    """Return the state dict, renamed by timm's function for the model if more names then fit."""
    if own_names == state.keys():
        return state
    module_name = type(model).__module__
    if not module_name.startswith("timm."):
        return state
    translate = getattr(sys.modules.get(module_name), "checkpoint_filter_fn", None)
    if translate is None:
        return state
    # The function may fail on names that it does not know; loading then says what does not fit.
    with contextlib.suppress(Exception):
        translated: dict[str, Any] = translate(dict(state), model)
        differences = _name_differences(own_names, translated)
        fits_better = differences < _name_differences(own_names, state)
        if fits_better and _all_have_data(translated.values()):
            return translated
    return state


def _name_differences(names: Collection[str], others: Collection[str]) -> int:
    return len(set(names) ^ set(others))


def _all_have_data(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) and not value.is_meta for value in values)
