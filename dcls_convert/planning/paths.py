"""Match qualified names of modules with patterns, and find names that are like a pattern."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

MAX_NEAREST = 3  # paths to suggest for one pattern


def matches_path(name: str, patterns: Sequence[str]) -> bool:
    """Return True if one of the patterns matches the module of this name.

    A pattern with `*`, `?` or `[...]` must match the whole name, and `*` also matches dots. A name,
    which may have brackets of its own, matches the module of that name, and all modules inside it.
    """
    for pattern in patterns:
        if name == pattern or name.startswith(f"{pattern}."):
            return True
        if fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def any_matches_path(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches one of these names, such as the names of one module."""
    for name in names:
        if matches_path(name, patterns):
            return True
    return False


def nearest_paths(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the paths, of these modules or those around them, that are most like the patterns.

    If none is like a pattern, return the outermost paths.
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
