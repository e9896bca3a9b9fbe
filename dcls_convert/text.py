"""Format text for messages and tables, and make text from outside safe to print."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.cells import cell_len


def did_you_mean(word: str, known: Iterable[str], limit: int = 1) -> str:
    """Return `" (did you mean 'a' or 'b'?)"` with the known words closest to `word`, or ""."""
    close = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=limit, cutoff=0.6)
    if not close:
        return ""
    return f" (did you mean {' or '.join(map(repr, close))}?)"


def printable(text: object, keep: str = "") -> str:
    """Make text from outside safe for a terminal.

    Characters that are not printable are escaped, except those in `keep`.
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


def shortened(text: object, limit: int = 60) -> str:
    """Return printable text for a message or table, at most `limit` terminal columns wide.

    The middle of a longer text is replaced by dots.
    """
    text = str(text)
    if len(text) <= limit:
        escaped = printable(text)
        if cell_len(escaped) <= limit:
            return escaped
    room = max(limit - len("..."), 0)
    end_room = room // 2
    start_room = room - end_room
    start = printable(text[:start_room])
    while cell_len(start) > start_room:
        start = start[:-1]
    end = printable(text[len(text) - end_room :])
    while cell_len(end) > end_room:
        end = end[1:]
    return f"{start}...{end}"


def short_list(names: Iterable[object], max_names: int = 3) -> str:
    """Return "a, b, c and 4 more", or "nothing" if there are no names."""
    names = list(names)
    text = ", ".join(shortened(name, 120) for name in names[:max_names]) or "nothing"
    if len(names) > max_names:
        text += f" and {len(names) - max_names} more"
    return text


def one_line(error: BaseException) -> str:
    """Return the message of any exception on one printable line."""
    message = " ".join(str(error).split())
    return printable(message or type(error).__name__)


def range_text(values: Iterable[Any], text: Callable[[Any], str] = str) -> str:
    """Return the smallest and the largest value as text: "29..40".

    If both are the same, the text is that value alone; without values, it is empty.
    """
    ordered = sorted(values)
    if not ordered:
        return ""
    least = text(ordered[0])
    greatest = text(ordered[-1])
    if least == greatest:
        return least
    return f"{least}..{greatest}"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: 1 and "layer" -> "1 layer"; 1200 -> "1,200 layers"."""
    if count == 1:
        return f"{count:,} {noun}"
    return f"{count:,} {noun}s"


def counts_text(counts: Iterable[int], noun: str) -> str:
    """Return the smallest and the largest count with their noun: "1 layer", "29..40 layers"."""
    text = range_text(counts)
    if text == "1":
        return f"{text} {noun}"
    return f"{text} {noun}s"


def join_with_and(names: Sequence[str]) -> str:
    """Return "a, b and c"."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} and {last}"
