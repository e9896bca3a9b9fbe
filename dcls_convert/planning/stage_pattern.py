"""A rule's own stages: a regular expression for module names, which may come from a stranger.

RE2 takes linear time, whatever the pattern; Python's own engine would take hours for some.
"""

import functools
from typing import Any

import re2

MOST_MEMORY = 8 << 20  # bytes for one pattern; RE2's own default


class PatternError(ValueError):
    """Not a regular expression of RE2."""


@functools.cache
def compiled(pattern: str) -> Any:
    """The regular expression; PatternError where it is none. See https://github.com/google/re2/wiki/Syntax."""
    options = re2.Options()
    options.log_errors, options.max_mem = False, MOST_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        problem = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise PatternError(problem.partition(": ")[0]) from error  # it goes on with the pattern


def stage_by_pattern(pattern: str, name: str) -> str | None:
    """The stage that a rule's pattern gives a module.

    The name of the named group that matches; without one, what the groups find, else what the whole pattern finds.

    >>> stage_by_pattern(r"blocks\\.(?:(?P<early>[0-3])|(?P<late>[4-9]))\\.", "blocks.5.conv")
    'late'
    >>> stage_by_pattern(r"(stage\\d)", "net.stage2.unit1.conv")
    'stage2'
    """
    found = compiled(pattern).search(name)
    if found is None:
        return None
    named = [group for group, text in found.groupdict().items() if text is not None]
    return named[0] if named else ".".join(filter(None, found.groups())) or found.group(0) or None
