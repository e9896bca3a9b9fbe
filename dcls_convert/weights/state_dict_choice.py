"""Choose one of a weights file's state dicts, which may lie in nested mappings."""

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
    "teacher",  # before the student, because it is the student's average
    "student",
)
MAX_NESTING = 3  # levels of mappings to open; bounded because a mapping can hold itself


def choose_state_dict(
    content: Any, where: str, *, key: str | None = None, note: Note
) -> Mapping[Any, Any]:
    """Return the state dict in the content of a file.

    Args:
        content: What the file holds.
        where: What messages call the file.
        key: Path to the state dict, joined by dots: keys of mappings, then perhaps a prefix of
            names. None for the first under STATE_DICT_KEYS.
        note: Called with a line that says which state dict is taken, if it is inside a mapping.

    Raises:
        CheckpointError: The content holds no state dict, or nothing under the key.
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
            "a checkpoint key can name a state dict inside it"
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
    """Return the first state dict in nested mappings, with the keys that lead to it; or None."""
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
    """Return the keys of a mapping that are strings; [] if the content is not a mapping."""
    if not isinstance(content, Mapping):
        return []
    return [key for key in content if isinstance(key, str)]


def _under_stated_key(content: Any, where: str, key: str) -> Any:
    """Return the content under the stated key, in the file or in the state dict chosen from it."""
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
    """Return the content under keys joined by dots; the last key may be a prefix of names."""
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
