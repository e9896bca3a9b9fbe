"""Prepare a command line for typer: the command `convert` need not be named."""

import difflib
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from ..errors import DclsConvertError

DEFAULT_COMMAND = "convert"
KEYWORDS_OPTION = "--model-kwargs"  # may be followed by several values


class Commands(TyperGroup):
    """The commands, of which the default one need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if no command is named.

        Raises:
            DclsConvertError: The first argument is nearly a command's name.
        """
        if args:
            args = _repeat_option(self._with_command(ctx, args))
        return super().parse_args(ctx, args)

    def _with_command(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0]
        known = set(self.commands)
        for parameter in self.get_params(ctx):
            known.update(parameter.opts)
        if first in known:
            return args
        # With a cutoff of 0.8, no registered model's name is this close to a command.
        close = difflib.get_close_matches(first, self.commands, n=1, cutoff=0.8)
        if close and not first.startswith("-") and not Path(first).exists():
            raise DclsConvertError(f"there is no command {first!r} (did you mean {close[0]!r}?)")
        return [DEFAULT_COMMAND, *args]


def _repeat_option(args: list[str]) -> list[str]:
    """Turn `--model-kwargs a=1 b=2` into `--model-kwargs a=1 --model-kwargs b=2`.

    timm's scripts take the first form; typer takes one value for each option.
    """
    words: list[str] = []
    in_list = False
    for word in args:
        is_keyword = "=" in word and not word.startswith("-")
        if in_list and is_keyword and words[-1] != KEYWORDS_OPTION:
            words.append(KEYWORDS_OPTION)
        in_list = word == KEYWORDS_OPTION or (in_list and is_keyword)
        words.append(word)
    return words
