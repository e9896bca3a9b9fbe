"""Choose one of the state dicts that a weights file holds, perhaps in nested mappings."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..progress import Note
from ..text import short_list, shortened

# Keys under which training scripts store a state dict. Averaged weights (EMA) come first, as in
# timm.
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema_model", "ema")
STATE_DICT_KEYS = (
    *AVERAGED,
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


class UnreadValue:
    """Stands for a value of NumPy or a path in a torch file: holds nothing, and runs nothing."""

    def __new__(cls, *_: object) -> "UnreadValue":
        """Ignore the value."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Ignore the value."""


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
        content = _follow_stated_key(content, where, key)
        where = f"{where}, {shortened(key)}"
    keys = _keys_of_state_dict(content)
    if keys is None:
        raise CheckpointError(f"{where}: {_why_there_is_none(content)}")
    if keys:
        note(f"{where}: {_choice_of_weights(content, keys)}")
    return _at(content, keys)


def _at(content: Mapping[Any, Any], keys: list[str]) -> Mapping[Any, Any]:
    for key in keys:
        content = content[key]
    return content


def _keys_of_state_dict(content: Any, depth: int = 0) -> list[str] | None:
    """Return the keys that lead to the state dict in nested mappings, or None if there is none."""
    if not isinstance(content, Mapping) or depth > MAX_NESTING:
        return None
    for key in STATE_DICT_KEYS:
        inner_keys = _keys_of_state_dict(content.get(key), depth + 1)
        if inner_keys is not None:
            return [key, *inner_keys]
    others = _unusual_keys(content)
    if len(others) == 1:
        return others
    if any(isinstance(value, Tensor | UnreadValue) for value in content.values()):
        return []
    return None


def _unusual_keys(content: Mapping[Any, Any]) -> list[str]:
    """Return the keys under which all entries are named tensors."""
    keys: list[str] = []
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, Mapping) and value:
            names_are_text = all(isinstance(name, str) for name in value)
            if names_are_text and all(isinstance(entry, Tensor) for entry in value.values()):
                keys.append(key)
    return keys


def _why_there_is_none(content: Any) -> str:
    if isinstance(content, UnreadValue):
        return "holds a NumPy value or a path, not a state dict (names to tensors)"
    if not isinstance(content, Mapping):
        return f"holds a {type(content).__name__}, not a state dict (names to tensors)"
    several = _unusual_keys(content)
    if several:
        return f"holds several state dicts: {short_list(several, 8)}; name one as checkpoint key"
    names = [key for key in content if isinstance(key, str)]
    text = f"holds a mapping with {short_list(names)}, not a state dict (names to tensors)"
    if any(isinstance(value, Mapping) for value in content.values()):
        text += "; a checkpoint key can name one that is inside"
    return text


def _choice_of_weights(content: Mapping[Any, Any], keys: list[str]) -> str:
    """Describe which of a file's weights are used, and which are not."""
    place = " / ".join(keys)
    others: list[str] = []
    for key in (*STATE_DICT_KEYS, *_unusual_keys(content)):
        is_other = key != keys[0] and key not in others
        if is_other and isinstance(content.get(key), Mapping | list):
            others.append(key)
    text = f"takes the weights under {place}"
    if keys[0] in AVERAGED:
        text = f"takes the averaged weights, {place}"
    if others:
        text += f", not {short_list(others)}; a checkpoint key chooses"
    return text


def _follow_stated_key(content: Any, where: str, key: str) -> Any:
    """Return what lies under the stated key in the content, or in the state dict chosen from it."""
    path = key.rstrip(".")
    found = _follow(content, path)
    default = _keys_of_state_dict(content)
    if found is None and default is not None:
        weights = _at(content, default)
        found = _follow(weights, path) or _follow(weights, f"module.{path}")  # of DataParallel
    if found is None:
        raise CheckpointError(
            f"{where}: has nothing under the checkpoint key {shortened(key)!r}; "
            f"it has {short_list(_possible_keys(content), 8)}"
        )
    return found


def _possible_keys(content: Any) -> list[str]:
    """Return the keys under which there are weights; in a state dict, the first parts of names."""
    if not isinstance(content, Mapping):
        return []
    keys = [key for key in content if isinstance(key, str)]
    holders = [key for key in keys if _keys_of_state_dict(content[key]) is not None]
    return holders or list(dict.fromkeys(key.split(".")[0] for key in keys))


def _follow(content: Any, path: str) -> Any:
    """Return what lies under keys joined by dots; the last may be a prefix of names."""
    if not isinstance(content, Mapping):
        return None
    if path in content:
        return content[path]
    prefix = f"{path}."
    entries: dict[str, Any] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            continue
        if path.startswith(f"{name}."):
            found = _follow(value, path.removeprefix(f"{name}."))
            if found is not None:
                return found
        if name.startswith(prefix):
            entries[name.removeprefix(prefix)] = value
    return entries or None
