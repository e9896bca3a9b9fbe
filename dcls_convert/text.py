"""Texts for messages and tables: names, counts and lists in words, and outside text made safe."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.cells import cell_len

MAX_ERROR_CHARACTERS = 10_000  # what an error says beyond them is ignored


def did_you_mean(word: str, known: Iterable[str], limit: int = 1) -> str:
    """`" (did you mean 'a' or 'b'?)"` with the known words closest to `word`, or an empty text."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=limit, cutoff=0.6)
    if not close:
        return ""
    return f" (did you mean {' or '.join(map(repr, close))}?)"


def printable(text: object, keep: str = "") -> str:
    """Text from outside, safe for a terminal.

    All characters but printable ones and those in `keep` are escaped.
    """
    text = str(text)
    if text.isprintable():
        return text
    safe = []
    for character in text:
        if character.isprintable() or character in keep:
            safe.append(character)
        else:
            safe.append(character.encode("unicode_escape").decode())
    return "".join(safe)


def shown(text: object, limit: int = 60) -> str:
    """The text as a message or table shows it, in at most `limit` columns of the terminal.

    A longer one loses its middle.
    """
    text = str(text)
    if len(text) <= limit:
        escaped = printable(text)
        if cell_len(escaped) <= limit:
            return escaped
    room = max(limit - 3, 0)  # beside the dots
    end_room = room // 2
    start_room = room - end_room
    start = printable(text[:start_room])
    while cell_len(start) > start_room:
        start = start[:-1]
    end = printable(text[len(text) - end_room :])
    while cell_len(end) > end_room:
        end = end[1:]
    return f"{start}{'...'[:limit]}{end}"


def listed(names: Iterable[object], max_names: int = 3) -> str:
    """ "a, b, c and 4 more", or "nothing" if there are no names."""
    names = list(names)
    text = ", ".join(shown(name, 120) for name in names[:max_names]) or "nothing"
    if len(names) > max_names:
        text += f" and {len(names) - max_names} more"
    return text


def one_line(error: BaseException) -> str:
    """The message of any exception, on one line: what a library said, without its layout."""
    words = str(error)[:MAX_ERROR_CHARACTERS].split()
    message = " ".join(words) or type(error).__name__
    return printable(message)


def span(values: Iterable[Any], text: Callable[[Any], str] = str) -> str:
    """The least and the greatest value, "29..40".

    A single value stands by itself, and no values give an empty text.
    """
    ordered = sorted(values)
    if not ordered:
        return ""
    least = text(ordered[0])
    greatest = text(ordered[-1])
    if least == greatest:
        return least
    return f"{least}..{greatest}"


def counted(count: int, noun: str) -> str:
    """1 and "layer" -> "1 layer"; 1200 -> "1,200 layers"."""
    if count == 1:
        return f"{count:,} {noun}"
    return f"{count:,} {noun}s"


def enumerated(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} and {last}"
