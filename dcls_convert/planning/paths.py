"""Patterns for qualified names of modules: which names they mean, and which are like them."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

WILDCARDS = frozenset("*?[")
MAX_NEAREST = 3  # paths that a message names


def matches_path(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern means the module of this name.

    A pattern with `*`, `?` or `[...]` must fit the whole name, and `*` also stands for dots. One
    without them means the module that is called so, and all modules inside it.
    """
    for pattern in patterns:
        if fnmatch.fnmatchcase(name, pattern):
            return True
        if WILDCARDS.isdisjoint(pattern) and name.startswith(f"{pattern}."):
            return True
    return False


def any_matches_path(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether a pattern means one of these names, such as the names of one module."""
    for name in names:
        if matches_path(name, patterns):
            return True
    return False


def nearest_paths(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The paths that are spelt most like the patterns: of these modules, or of those around them.

    The outermost paths, if none is like a pattern.
    """
    paths: dict[str, None] = {}  # in the order of the names, each once
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            paths[".".join(parts[:length])] = None
    near: list[str] = []
    for pattern in patterns:
        near += difflib.get_close_matches(pattern.strip("*."), list(paths), n=MAX_NEAREST)
    if not near:
        near = [path for path in paths if "." not in path]
    return list(dict.fromkeys(near))
