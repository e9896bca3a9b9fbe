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


def choose_state_dict(
    content: Any, where: str, *, key: str | None = None, note: Note
) -> Mapping[Any, Any]:
    """Return the state dict in the content of a file.

    Args:
        content: What the file holds.
        where: Its name in messages.
        key: Says which state dict: keys of mappings, then a prefix of names, all joined by dots.
            None for the first under the usual keys.
        note: Called with a line that says which one is taken, if it is inside a mapping.

    Raises:
        CheckpointError: There is none, or nothing says which.
    """
    if key is not None:
        content = _under_stated_key(content, where, key)
        where = f"{where}, {shortened(key)}"
    found = _find_state_dict(content)
    if found is None:
        names = _names_in(content)
        what = short_list(names, 8) if names else f"a {type(content).__name__}"
        raise CheckpointError(
            f"{where}: holds {what}, not a state dict (names to tensors); "
            "a checkpoint key can name one that is inside"
        )
    keys, state = found
    if keys:
        others: list[str] = []
        for other in _names_in(content):
            if other != keys[0] and _find_state_dict(content[other]) is not None:
                others.append(other)
        text = f"{where}: takes the weights under {' / '.join(keys)}"
        if others:
            text += f", not {short_list(others)}; a checkpoint key chooses"
        note(text)
    return state


def _find_state_dict(content: Any, depth: int = 0) -> tuple[list[str], Mapping[Any, Any]] | None:
    """Return the state dict in nested mappings, and the keys that lead to it; None if none does."""
    if not isinstance(content, Mapping) or depth > MAX_NESTING:
        return None
    for key in STATE_DICT_KEYS:
        inner = _find_state_dict(content.get(key), depth + 1)
        if inner is not None:
            return [key, *inner[0]], inner[1]
    if any(isinstance(value, Tensor) for value in content.values()):
        return [], content
    return None


def _names_in(content: Any) -> list[str]:
    """Return the keys of a mapping that are names; nothing for anything else."""
    if not isinstance(content, Mapping):
        return []
    return [key for key in content if isinstance(key, str)]


def _under_stated_key(content: Any, where: str, key: str) -> Any:
    """Return what lies under the stated key in the content, or in the state dict chosen from it."""
    path = key.rstrip(".")
    under = _follow(content, path)
    if under is None:
        chosen = _find_state_dict(content)
        under = None if chosen is None else _follow(chosen[1], path)
    if under is None:
        beginnings = dict.fromkeys(name.split(".")[0] for name in _names_in(content))
        raise CheckpointError(
            f"{where}: has nothing under the checkpoint key {shortened(key)!r}; "
            f"it has {short_list(beginnings, 8)}"
        )
    return under


def _follow(content: Any, path: str) -> Any:
    """Return what lies under keys joined by dots; the last may be a prefix of names."""
    if not isinstance(content, Mapping):
        return None
    if path in content:
        return content[path]
    first, _, rest = path.partition(".")
    if first in content:
        return _follow(content[first], rest)
    entries: dict[str, Any] = {}
    for name in _names_in(content):
        if name.startswith(f"{path}."):
            entries[name.removeprefix(f"{path}.")] = content[name]
    return entries or None
