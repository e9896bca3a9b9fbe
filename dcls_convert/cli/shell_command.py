"""Write commands as a user would type them."""

import shlex
from collections.abc import Mapping
from typing import Any

from ..geometry import size_text
from ..options import AUTO


def shell_command(model: str, options: Mapping[str, Any], command: str = "") -> str:
    """Return a command that can be pasted into a shell.

    Args:
        model: The argument MODEL.
        options: Values of options by the names of their parameters. True is written as a flag;
            None, False and "auto" are left out.
        command: A command other than the default one, such as "sweep".
    """
    words = ["dcls-convert", model]
    if command:
        words.insert(1, command)
    for name, value in options.items():
        if value is None or value is False or value == AUTO:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words += [f"{key}={_literal(entry)}" for key, entry in value.items()]
        elif isinstance(value, list | tuple):
            words.append(size_text(value))  # or a window
        elif value is not True:
            words.append(str(getattr(value, "source", value)))  # of a rule set, its name or file
    return shlex.join(words)


def _literal(value: Any) -> str:
    """Return the text that is parsed into this value: Python, or a bare word."""
    if isinstance(value, str) and value.isidentifier() and value not in ("None", "True", "False"):
        return value
    return repr(value)
