"""Make typer options and arguments, and parse their values."""

import re
from collections.abc import Callable
from typing import Any, get_args

import typer

from ..input_files import check_folder
from ..options import AUTO, GROWTH, MAX_SIDE, check_even
from ..text import shortened
from .completion import complete_files

# Groups of options in --help; options.py has WHAT_TO_CONVERT and HOW_MANY_ELEMENTS.
WHERE = "Where they start"
OUTPUT = "Output"
RUNNING = "How to run"

LONGEST_CHOICES = 22  # characters of `one|two|three`; --help would wrap a longer list
SECONDS_PER_DAY = 86_400  # upper limit of options that take seconds
MAX_SEED = 2**63 - 1  # largest signed 64-bit integer; torch.Generator takes it


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Return a typer option that --help lists in the group `panel`.

    `names` must be given for a flag; otherwise typer adds a --no- form.
    """
    default_text = settings.get("show_default")
    if isinstance(default_text, str):
        # typer would print a text as [default: (TEXT)].
        help = f"{help} \\[default: {default_text}]"
        settings["show_default"] = False
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


def number(
    kind: type[Any],
    minimum: Any,
    maximum: int,
    panel: str,
    help: str,
    *,
    word: str = "",
    unit: str = "",
    **settings: Any,
) -> Any:
    """Return an option whose value is a number in plain digits, or `word`."""
    parse = number_parser(kind, minimum, maximum, word=word, unit=unit)
    return option(panel, help, parser=parse, **settings)


def number_parser(
    kind: type[Any], minimum: Any, maximum: int, *, word: str = "", unit: str = ""
) -> Callable[[Any], Any]:
    """Return a parser of a number in plain digits, or of `word`.

    int() and float() alone would also accept `1_000`, ` 17 ` and `nan`.
    """
    digits = r"[0-9]{1,19}"
    noun = "an integer"
    if kind is float:
        digits = r"[0-9]{1,19}(\.[0-9]{1,19})?"
        noun = "a number"
    allowed = f"{noun} from {minimum} to {maximum}"
    if word:
        allowed += f", or {word}"

    def parse(text: Any) -> Any:
        if word and text == word:
            return word
        number_text = str(text).removesuffix(unit)
        if re.fullmatch(digits, number_text):
            value = kind(number_text)
            if minimum <= value <= maximum:
                return value
        raise typer.BadParameter(f"'{shortened(text)}' is not {allowed}")

    return parse


def choice(words: Any, panel: str, help: str, **settings: Any) -> Any:
    """Return an option whose value is one of the words of a `Literal`; --help lists them."""
    names = get_args(words)
    metavar = "|".join(names)
    if len(metavar) > LONGEST_CHOICES:
        metavar = "NAME"
        if not all(name in help for name in names):
            help = f"{help} One of {', '.join(names)}."
    return option(panel, help, metavar=metavar, **settings)


def argument(metavar: str, help: str, complete: Callable[[str], list[str]], **settings: Any) -> Any:
    return typer.Argument(
        metavar=metavar, help=help, autocompletion=complete, show_default=False, **settings
    )


def checkpoint_argument(metavar: str, help: str) -> Any:
    return argument(metavar, help, complete_files, callback=check_folder)


def image_size(panel: str, help: str) -> Any:
    return option(panel, help, metavar="CxHxW", parser=parse_input_size)


def _parse_sides(text: str, allowed_counts: range, expected: str) -> tuple[int, ...]:
    """Parse "17x9" into (17, 9); `expected` completes the error "TEXT is not ..."."""
    sides: tuple[int, ...] = ()
    if re.fullmatch(r"[0-9]{1,4}([xX][0-9]{1,4})*", text):
        sides = tuple(int(side) for side in re.split("[xX]", text))
    if len(sides) not in allowed_counts or 0 in sides:
        raise typer.BadParameter(f"'{shortened(text)}' is not {expected}")
    return sides


def parse_window_or_auto(text: str) -> int | str | tuple[int, ...]:
    """Parse "auto", or a window as `parse_window` does; refuse an odd growth."""
    if text == AUTO:
        return AUTO
    window = parse_window(text)
    if isinstance(window, str):
        try:
            check_even(window)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return window


def parse_window(text: str) -> int | str | tuple[int, ...]:
    """Parse "17" into 17, and "17x9" into (17, 9); a growth such as "+4" stays text."""
    if re.fullmatch(GROWTH, text):
        return text
    expected = (
        f"a size: give an integer from 1 to {MAX_SIDE} such as 17, sides such as 17x9, "
        "or a growth such as +4"
    )
    sides = _parse_sides(text, range(1, 4), expected)
    if len(sides) == 1:
        return sides[0]
    return sides


def parse_input_size(text: str) -> tuple[int, ...]:
    """Parse "3x224x224" into (3, 224, 224), and "1x16000" into (1, 16000)."""
    signal = re.fullmatch(r"([1-9][0-9]{0,3})[xX]([1-9][0-9]{0,6})", text)
    if signal:
        return int(signal[1]), int(signal[2])
    expected = f"an input size: give channels and sides from 1 to {MAX_SIDE}, such as 3x224x224"
    return _parse_sides(text, range(2, 5), expected)


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,0.4,0.3" into (0.5, 0.4, 0.3)."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(,[0-9]{1,9}(\.[0-9]{1,9})?)*", text):
        raise typer.BadParameter(
            f"'{shortened(text)}' is not a list of numbers such as 0.485,0.456,0.406"
        )
    return tuple(map(float, text.split(",")))
