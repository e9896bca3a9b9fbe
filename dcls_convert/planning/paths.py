"""Match qualified names of modules with patterns, and find names that resemble a pattern."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

MAX_NEAREST = 3  # paths to suggest for one pattern


def matches_path(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """True if one of the patterns matches a module that has these names.

    A pattern with `*`, `?` or `[...]` must match a whole name, and `*` also matches dots. A name,
    which may have brackets of its own, matches the module of that name, and all modules inside it.
    """
    for name in names:
        for pattern in patterns:
            if name == pattern or name.startswith(f"{pattern}."):
                return True
            if fnmatch.fnmatchcase(name, pattern):
                return True
    return False


def nearest_paths(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the paths, of the named modules or modules around them, most like the patterns.

    If no path resembles a pattern, return the outermost paths.
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
