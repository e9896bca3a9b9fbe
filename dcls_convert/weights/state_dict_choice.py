"""Choose one of the state dicts that a weights file holds, perhaps in nested mappings."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..progress import Note
from ..text import short_list, shortened

# Keys under which training scripts store a state dict. Averaged weights (EMA) come first, as in
# timm.
STATE_DICT_KEYS = (
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "params_ema",
    "ema_model",
    "ema",
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "params",
    "weights",
    "teacher",  # the average of the student, where there are both and nothing else
    "student",
)
MAX_NESTING = 3  # levels of mappings to open; bounded because a mapping can hold itself
EXTRA_STATE = "_extra_state"  # how names of what `Module.get_extra_state` returns end


def choose_state_dict(
    content: Any, where: str, *, key: str | None = None, note: Note
) -> Mapping[Any, Any]:
    """Return the state dict in the content of a file.

    Args:
        content: What the file holds.
        where: Its name in messages.
        key: Says which state dict: keys of mappings, then a prefix of names, all joined by dots.
            None for the first under the usual keys, or the only one under another key.
        note: Called with a line that says which one is taken, if the file holds more.

    Raises:
        CheckpointError: There is none, or nothing says which.
    """
    if key is not None:
        content = _under_stated_key(content, where, key)
        where = f"{where}, {shortened(key)}"
    keys = _keys_of_state_dict(content)
    entries = _named_entries(content)
    if keys is None:
        what = short_list(entries, 8) if entries else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{where}: holds {what}, not a state dict (names to tensors); "
            "a checkpoint key can name one that is inside"
        )
    if keys:
        others: list[str] = []
        for other, value in entries.items():
            if other != keys[0] and _keys_of_state_dict(value) is not None:
                others.append(other)
        text = f"{where}: takes the weights under {' / '.join(keys)}"
        if others:
            text += f", not {short_list(others)}; a checkpoint key chooses"
        note(text)
    state: Mapping[Any, Any] = _at(content, keys)
    return state


def _keys_of_state_dict(content: Any, depth: int = 0) -> list[str] | None:
    """Return the keys that lead to the state dict in nested mappings, or None if there is none."""
    entries = _named_entries(content)
    if not entries or depth > MAX_NESTING:
        return None
    for key in STATE_DICT_KEYS:
        inner_keys = _keys_of_state_dict(entries.get(key), depth + 1)
        if inner_keys is not None:
            return [key, *inner_keys]
    tensors = sum(isinstance(value, Tensor) for value in entries.values())
    others: list[str] = []
    for key, value in entries.items():
        inner = _named_entries(value)
        # Beside more tensors, it is not the network's: a mean and a std, for example.
        if len(inner) > tensors and all(isinstance(entry, Tensor) for entry in inner.values()):
            others.append(key)
    if len(others) == 1:
        return others
    if tensors:
        return []
    return None


def _named_entries(content: Any) -> dict[str, Any]:
    """Return the entries of a mapping that have names; nothing for anything else.

    The extra state of a module is left out: it may be a dict of tensors, but it is no state dict.
    """
    entries: dict[str, Any] = {}
    if isinstance(content, Mapping):
        for key, value in content.items():
            if isinstance(key, str) and not key.endswith(EXTRA_STATE):
                entries[key] = value
    return entries


def _at(content: Any, keys: list[str]) -> Any:
    for key in keys:
        content = content[key]
    return content


def _under_stated_key(content: Any, where: str, key: str) -> Any:
    """Return what lies under the stated key in the content, or in the state dict chosen from it."""
    path = key.rstrip(".")
    weights = _at(content, _keys_of_state_dict(content) or [])
    in_parallel = f"module.{path}"  # names of DataParallel
    for found in (_follow(content, path), _follow(weights, path), _follow(weights, in_parallel)):
        if found is not None:
            return found
    beginnings = dict.fromkeys(name.split(".")[0] for name in _named_entries(content))
    raise CheckpointError(
        f"{where}: has nothing under the checkpoint key {shortened(key)!r}; "
        f"it has {short_list(beginnings, 8)}"
    )


def _follow(content: Any, path: str) -> Any:
    """Return what lies under keys joined by dots; the last may be a prefix of names."""
    if not isinstance(content, Mapping):
        return None
    if path in content:
        return content[path]
    first, _, rest = path.partition(".")
    if rest and first in content:
        return _follow(content[first], rest)
    entries: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(name, str) and name.startswith(f"{path}."):
            entries[name.removeprefix(f"{path}.")] = value
    return entries or None
