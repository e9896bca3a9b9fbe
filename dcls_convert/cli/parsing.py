"""Parse option values that are more than a word, a plain number or a path.

The functions raise ValueError; typer puts the option's name before its message.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DclsConvertError
from ..options import (
    AUTO,
    GROWTH,
    MAX_COUNT,
    MAX_PERCENT,
    MAX_SIDE,
    MIN_PERCENT,
    parse_percent,
)
from ..text import shortened

MAX_INPUT_SIDE = 9_999_999  # pixels, or samples of a signal
KEYWORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)  # KEY=VALUE


def parse_window(text: str) -> int | str | tuple[int, ...]:
    """Parse "17" into 17, and "17x9" into (17, 9); "auto" and a growth such as "+4" stay text."""
    if text == AUTO or re.fullmatch(GROWTH, text):
        return text
    expected = (
        f"a size: give an integer from 1 to {MAX_SIDE} such as 17, sides such as 17x9, "
        "or a growth such as +4"
    )
    sides = _parse_sides(text, range(1, 4), MAX_SIDE, expected)
    if len(sides) == 1:
        return sides[0]
    return sides


def parse_input_size(text: str) -> tuple[int, ...]:
    """Parse "3x224x224" into (3, 224, 224)."""
    expected = (
        f"an input size: give channels and sides from 1 to {MAX_INPUT_SIDE}, such as 3x224x224; "
        "inputs other than one image are given as example_inputs in Python"
    )
    return _parse_sides(text, range(2, 5), MAX_INPUT_SIDE, expected)


def _parse_sides(text: str, counts: range, longest: int, expected: str) -> tuple[int, ...]:
    """Parse "17x9" into (17, 9); `expected` completes the error "TEXT is not ..."."""
    sides: tuple[int, ...] = ()
    if re.fullmatch(r"[0-9]{1,7}([xX][0-9]{1,7})*", text):
        sides = tuple(int(side) for side in re.split("[xX]", text))
    if len(sides) not in counts or not all(1 <= side <= longest for side in sides):
        raise ValueError(f"'{shortened(text)}' is not {expected}")
    return sides


def parse_count(text: str) -> int | str:
    """Parse a number of elements, or "auto"."""
    if text == AUTO:
        return AUTO
    if re.fullmatch(r"[0-9]{1,19}", text) and 1 <= int(text) <= MAX_COUNT:
        return int(text)
    raise ValueError(f"'{shortened(text)}' is not an integer from 1 to {MAX_COUNT}, or {AUTO}")


def parse_budget(text: str | float) -> float:
    """Parse "80" and "80%" into 80.0."""
    return float(100 * parse_percent(text))


def parse_numbers(text: str) -> tuple[float, ...]:
    """Parse "0.5,0.4,0.3" into (0.5, 0.4, 0.3)."""
    return tuple(map(float, text.split(",")))


def parse_keywords(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Parse ["ls_init_value=0.1", "norm=none"] into {"ls_init_value": 0.1, "norm": "none"}.

    As in timm's own scripts, a value is read as a Python literal or, if that fails, as text. Tuples
    become lists, because folders store the values as JSON.

    Raises:
        DclsConvertError: A text is not KEY=VALUE, or JSON cannot store the value.
    """
    if not texts:
        return None
    keywords: dict[str, Any] = {}
    for text in texts:
        match = KEYWORD.fullmatch(text)
        if match is None:
            raise DclsConvertError(f"--model-kwargs: '{shortened(text)}' is not KEY=VALUE")
        key, value = match.groups()
        keywords[key] = _plain_value(text, value)
    return keywords


def _plain_value(keyword: str, text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise DclsConvertError(
            f"--model-kwargs: '{shortened(keyword)}': a value is a number, a text, True, False, "
            "None, or a list or dict of these"
        ) from None


def parse_sizes(text: str) -> list[Any]:
    """Parse "7..11,17x9" into [7, 9, 11, (17, 9)]; growths such as "+4" stay text."""
    return _parse_list(
        text,
        parse_window,
        f"sizes from 1 to {MAX_SIDE}: 7..23 (steps of 2), 7..23..4 (steps of 4), 7,9,13, 17x9, "
        "or growths: +2,+4",
        step=2,  # the window and the old kernel must both be odd or both be even
    )


def parse_counts(text: str) -> list[Any]:
    """Parse "20,34" or "20..40..5" into numbers of elements."""
    expected = f"counts from 1 to {MAX_COUNT}, such as 20,34 or 20..40..5"
    return _parse_list(text, parse_count, expected)


def parse_budgets(text: str) -> list[Any]:
    """Parse "60%,80%" into [60.0, 80.0]."""
    expected = f"percentages from {MIN_PERCENT} to {MAX_PERCENT}, such as 60%,80%,100%"
    return _parse_list(text, parse_budget, expected)


def _parse_list(
    text: str, parse: Callable[[str], Any], expected: str, *, step: int = 1
) -> list[Any]:
    """Parse a list of values that `parse` reads, and of ranges.

    With a step of 2, "7..11,17" becomes [7, 9, 11, 17], and "7..11..4" becomes [7, 11].
    """
    values: list[Any] = []
    for part in text.split(","):
        try:
            bounds = [parse(bound) for bound in part.split("..")]
        except ValueError:
            bounds = []
        if len(bounds) == 1:
            values.append(bounds[0])
        elif len(bounds) in (2, 3) and all(isinstance(bound, int) for bound in bounds):
            first, last, *steps = bounds
            if last < first:
                raise ValueError(f"'{part}' runs backwards; give {last}..{first}")
            values += range(first, last + 1, *(steps or [step]))
        else:
            raise ValueError(f"'{shortened(part)}' is not a list of {expected}")
    return list(dict.fromkeys(values))
