"""Names of weights: those of files and trainers, turned into the network's own."""

import contextlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..progress import Note, silent
from ..text import listed

# Largest share of names that may lack a prefix which all others have: those are of a trainer, such
# as the weights of its loss.
MAX_OTHER_SHARE = 0.1


def with_names_of(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    where: str = "the state dict",
    note: Note = silent,
) -> dict[str, Tensor]:
    """Rename the entries of a state dict to the model's names.

    Prefixes that a trainer or wrapper puts before all names are taken off, such as "module." of
    DistributedDataParallel or "model." of Lightning. timm translates names of downloaded weights by
    a function of the model's module. Files of other programs also lack BatchNorm's
    `num_batches_tracked`; inference does not use it, so 0 is filled in.

    Args:
        model: Its state dict has the names wanted.
        state: Under any names. Where nothing fits better, they stay as they are.
        where: How notes call the state dict.
        note: Told which prefix was taken off, and which entries do not have it.
    """
    own = model.state_dict().keys()
    named = state
    if own != state.keys():
        prefix, named = _best_names(model, state, own)
        if prefix:
            note(_prefix_note(where, prefix, state))
    completed = dict(named)
    differing = own ^ named.keys()
    if all(name in own and name.endswith(".num_batches_tracked") for name in differing):
        for name in differing:
            completed[name] = torch.tensor(0)
    return completed


def _best_names(
    model: nn.Module, state: Mapping[str, Tensor], own: Collection[str]
) -> tuple[str, Mapping[str, Tensor]]:
    """The prefix without which most names are the model's, "" for none, and the entries then."""
    best_prefix = ""
    best = _translated_by_timm(model, state, own)
    prefix = _common_prefix(state)
    while prefix is not None:
        bare = {}
        for name, tensor in state.items():
            if name.startswith(prefix):
                bare[name.removeprefix(prefix)] = tensor
        named = _translated_by_timm(model, bare, own)
        if _count_known(named, own) > _count_known(best, own):
            best_prefix = prefix
            best = named
        inner_prefix = _common_prefix(bare)
        if inner_prefix is None:
            break
        prefix += inner_prefix
    return best_prefix, best


def _common_prefix(names: Collection[str]) -> str | None:
    """The first component that nearly all names share, with its dot; None if they share none."""
    counts: dict[str, int] = {}
    for name in names:
        component, dot, _ = name.partition(".")
        if dot:
            counts[component] = counts.get(component, 0) + 1
    for component, count in counts.items():
        if count >= (1 - MAX_OTHER_SHARE) * len(names):
            return f"{component}."
    return None


def _count_known(names: Iterable[str], own: Collection[str]) -> int:
    return len(set(own).intersection(names))


def _prefix_note(where: str, prefix: str, names: Iterable[str]) -> str:
    text = f"{where}: removes the prefix {prefix!r} from its names"
    others = [name for name in names if not name.startswith(prefix)]
    if others:
        text += f"; ignored, because they lack it: {listed(others)}"
    return text


def _translated_by_timm(
    model: nn.Module, state: Mapping[str, Tensor], own: Collection[str]
) -> Mapping[str, Tensor]:
    """The state dict as timm's function for the model renames it, if more names then fit."""
    if own == state.keys():
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
        fits_better = _name_differences(own, translated) < _name_differences(own, state)
        if fits_better and _all_have_data(translated.values()):
            return translated
    return state


def _name_differences(names: Collection[str], others: Collection[str]) -> int:
    return len(set(names) ^ set(others))


def _all_have_data(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) and not value.is_meta for value in values)
