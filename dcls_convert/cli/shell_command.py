"""Write the command lines that a user would type."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..geometry import size_text
from ..options import AUTO

if TYPE_CHECKING:
    from ..conversion.request import NetworkRequest
    from ..planning.plan_options import PlanOptions


def shell_command(
    network: "NetworkRequest", planning: "PlanOptions", *, command: str = "", **more: Any
) -> str:
    """Return a command for a network that can be pasted into a shell.

    The command has the options that `convert` and `sweep` share, and those in `more`.

    Args:
        network: A network that has a name.
        planning: The planning options.
        command: A command other than the default one, such as "sweep".
        more: Values of further options, by parameter name. None, False and "auto" are left out.
    """
    from ..planning.plan_options import PlanOptions

    options = {
        "pretrained": network.pretrained,
        "checkpoint": network.weights,
        "checkpoint_key": network.checkpoint_key,
        "num_classes": network.num_classes,
        "in_chans": network.in_chans,
        "model_kwargs": network.model_kwargs,
        "rules": planning.rules,
        "strict": planning.strict,
        **more,
        "tie": None if planning.tie == PlanOptions().tie else planning.tie,
        "interpolation": planning.interpolation,
        "input_size": network.input_size,
    }
    words = ["dcls-convert", str(network.model)]
    if command:
        words.insert(1, command)
    for name, value in options.items():
        if value is None or value is False or value == AUTO:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            words += [f"{key}={_literal(entry)}" for key, entry in value.items()]
        elif isinstance(value, list | tuple):
            words.append(size_text(value))  # an input size or a window
        elif value is not True:
            words.append(str(getattr(value, "source", value)))  # a rule set's name or file
    return shlex.join(words)


def _literal(value: Any) -> str:
    """Return the text that is parsed into a value: a Python literal, or a bare word."""
    if isinstance(value, str) and value.isidentifier() and value not in ("None", "True", "False"):
        return value
    return repr(value)
