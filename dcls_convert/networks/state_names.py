"""Translate the names of weights in files and from trainers into the network's own."""

import contextlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..progress import Note, ignore_messages
from ..text import short_list

# Largest share of names that may lack the prefix of all others. Those belong to a trainer, such as
# the weights of its loss.
MAX_SHARE_WITHOUT_PREFIX = 0.1


def rename_to_model(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    where: str = "the state dict",
    note: Note = ignore_messages,
) -> dict[str, Tensor]:
    """Rename the entries of a state dict to the model's names.

    Prefixes that a trainer or wrapper puts before all names are removed, such as "module." from
    DistributedDataParallel or "model." from Lightning. Original names of weights that timm
    downloads are translated by timm's function for the model. Files of other programs may lack
    BatchNorm's `num_batches_tracked`; inference does not use it, so 0 is filled in.

    Args:
        model: Its state dict has the names wanted.
        state: Weights under any names, which stay as they are if nothing fits better.
        where: What notes call the state dict.
        note: Called with a line about the removed prefix, and the entries that lack it.
    """
    own_names = model.state_dict().keys()
    renamed = state
    if own_names != state.keys():
        prefix, renamed = _best_names(model, state, own_names)
        if prefix:
            note(_prefix_note(where, prefix, state))
    completed = dict(renamed)
    differing = own_names ^ renamed.keys()
    if all(name in own_names and name.endswith(".num_batches_tracked") for name in differing):
        for name in differing:
            completed[name] = torch.tensor(0)
    return completed


def _best_names(
    model: nn.Module, state: Mapping[str, Tensor], own_names: Collection[str]
) -> tuple[str, Mapping[str, Tensor]]:
    """Find the prefix without which most names are the model's.

    Returns:
        The prefix, "" for none, and the renamed entries.
    """
    best_prefix = ""
    best = _translated_by_timm(model, state, own_names)
    prefix = _common_prefix(state)
    while prefix is not None:
        bare = {}
        for name, tensor in state.items():
            if name.startswith(prefix):
                bare[name.removeprefix(prefix)] = tensor
        translated = _translated_by_timm(model, bare, own_names)
        if _count_known(translated, own_names) > _count_known(best, own_names):
            best_prefix = prefix
            best = translated
        inner_prefix = _common_prefix(bare)
        if inner_prefix is None:
            break
        prefix += inner_prefix
    return best_prefix, best


def _common_prefix(names: Collection[str]) -> str | None:
    """Return the first component that nearly all names share, with its dot, or None."""
    counts: dict[str, int] = {}
    for name in names:
        component, dot, _ = name.partition(".")
        if dot:
            counts[component] = counts.get(component, 0) + 1
    for component, count in counts.items():
        if count >= (1 - MAX_SHARE_WITHOUT_PREFIX) * len(names):
            return f"{component}."
    return None


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
