"""Mistakes of the user, as exceptions of one line; and texts from outside, made safe to print."""

import difflib
from collections.abc import Iterable

from rich.cells import cell_len

# Parts of the messages by which torch, C++ and the dynamic loader say that memory is exhausted.
NO_MEMORY = ("allocate memory", "bad_alloc", "failed to map segment", "out of memory")
MAX_ERROR_CHARACTERS = 10_000  # characters; what an error says beyond them is ignored


class DclsConvertError(ValueError):
    """A mistake in what the package was given.

    `str(error)` is one printable line that says what to do instead.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))
        self.on_command_line = str(self)  # the same, in words for the command line


class NothingMatchesError(DclsConvertError):
    """No convolution of the model matches the rules: normal, and with its own exit code."""

    exit_code = 3


class RuleError(DclsConvertError):
    """A rule set that cannot be read, or that does not fit the model."""


class PlanError(DclsConvertError):
    """Sizes, counts or a budget that the model's convolutions cannot take."""


class ModelError(DclsConvertError):
    """A model that cannot be found or built."""


class CheckpointError(DclsConvertError):
    """Weights or a checkpoint folder that cannot be read or written."""


class OutputExistsError(CheckpointError):
    """The output exists already."""

    def __init__(self, path: object) -> None:
        super().__init__(f"output {path} already exists; force=True replaces it")
        self.on_command_line = printable(
            f"output {path} already exists; --force replaces it, or name another"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is exhausted."""
    return isinstance(error, MemoryError) or any(words in one_line(error) for words in NO_MEMORY)


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


def listed(names: Iterable[object], most: int = 3) -> str:
    """ "a, b, c and 4 more", or "nothing" if there are no names."""
    names = list(names)
    text = ", ".join(shown(name, 120) for name in names[:most]) or "nothing"
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def one_line(error: BaseException) -> str:
    """The message of any exception, on one line: what a library said, without its layout."""
    words = str(error)[:MAX_ERROR_CHARACTERS].split()
    message = " ".join(words) or type(error).__name__
    return printable(message)
