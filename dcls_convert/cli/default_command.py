"""How a command line is read before typer reads it.

The command `convert` need not be named, lists need no commas, and "~/" is the home folder.
"""

import difflib
import os.path
import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

from ..errors import DclsConvertError

DEFAULT_COMMAND = "convert"
# Words that people try first, and the option that answers.
OPTION_OF_WORD = {"help": "--help", "version": "--version"}
KEYWORDS_OPTION = "--model-kwargs"  # takes one value or several
# Joins the numbers of an option's value that are given as separate words.
SEPARATORS = {"--dilated-size": "x", "--input-size": "x"}
SEPARATORS |= dict.fromkeys(("--sizes", "--counts", "--budgets", "--mean", "--std"), ",")
# What is joined by each: up to three sides and another one; or parts of a list.
NUMBERS = {"x": re.compile(r"[0-9]+(x[0-9]+){0,2}"), ",": re.compile(r"[+0-9.][+0-9.x%e,-]*")}
HOME = re.compile(r"^(--[a-z-]+=)?~(?=$|[/\\])")


class Commands(TyperGroup):
    """The commands, of which the default one need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command that is meant, join lists, and put the home folder for "~".

        Raises:
            DclsConvertError: The first argument is nearly a command's name.
        """
        if args:
            args = _join_numbers(_repeat_option(self._with_command(ctx, args)))
            args = [HOME.sub(_home, word) for word in args]
        return super().parse_args(ctx, args)

    def _with_command(self, ctx: Any, args: list[str]) -> list[str]:
        first, *rest = args
        if first in OPTION_OF_WORD:
            return [*rest, OPTION_OF_WORD[first]]
        known = set(self.commands)
        for parameter in self.get_params(ctx):
            known.update(parameter.opts)
        if first in known:
            return args
        # With a cutoff of 0.8, no registered model's name is this close to a command.
        close = difflib.get_close_matches(first, self.commands, n=1, cutoff=0.8)
        if close and not first.startswith("-"):
            raise DclsConvertError(f"there is no command {first!r} (did you mean {close[0]!r}?)")
        return [DEFAULT_COMMAND, *args]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete commands, or else the model of the default command; or options of both.

        Model names take seconds, so they are listed only if no command begins like this.
        """
        items = super().shell_complete(ctx, incomplete)
        default: Any = self.commands[DEFAULT_COMMAND]
        if incomplete.startswith("-"):
            items += default.shell_complete(ctx, incomplete)
        elif incomplete and not items:
            items = default.params[0].shell_complete(ctx, incomplete)  # MODEL
        return list({item.value: item for item in items}.values())


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


def _join_numbers(args: Sequence[str]) -> list[str]:
    """Turn `--input-size 3 64 64` into `--input-size 3x64x64`, and `--sizes 9 13` into 9,13."""
    words: list[str] = []
    for word in args:
        option, equals, value = word.partition("=")
        separator = SEPARATORS.get(words[-2]) if len(words) > 1 else None
        if equals and option in SEPARATORS:
            words += [option, value]
        elif separator and all(map(NUMBERS[separator].fullmatch, (words[-1], word))):
            words[-1] = words[-1].rstrip(",") + separator + word
        else:
            words.append(word)
    return words


def _home(match: re.Match[str]) -> str:
    """Return the home folder in the place of a "~" that the shell did not expand."""
    return (match[1] or "") + os.path.expanduser("~")
