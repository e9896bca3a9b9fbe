"""What can go wrong through the user's doing, as exceptions of one line: where, what was found,
what is allowed.
"""

import difflib
import json
from collections.abc import Iterable

from rich.cells import cell_len

MOST_SAID = 10_000  # characters of an error that are looked at


class DclsConvertError(ValueError):
    """A mistake in what the package was given; `str(error)` is one printable line that says how to
    mend it.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))
        self.on_command_line = str(self)  # the same, in words for the command line


class NothingMatchesError(DclsConvertError):
    """No convolution of the model matches the rules. A normal event, with an exit code of its own."""

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
    """What is to be written is there already."""

    def __init__(self, path: object) -> None:
        super().__init__(f"output {path} already exists; force=True replaces it")
        self.on_command_line = printable(
            f"output {path} already exists; --force replaces it, or name another"
        )


def did_you_mean(word: str, known: Iterable[str], limit: int = 1) -> str:
    """`" (did you mean 'a' or 'b'?)"` for the known words closest to `word`; empty where none is
    close.
    """
    close = difflib.get_close_matches(word, list(dict.fromkeys(known)), n=limit, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def printable(text: object, keep: str = "") -> str:
    """Text from outside, safe for a terminal: all but printable characters and those in `keep` are
    escaped.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode()
        for character in text
    )


def shown(text: object, limit: int = 60) -> str:
    """What a message or table shows of a text, in at most `limit` columns; longer ones lose their
    middle.
    """
    text = str(text)
    if len(text) <= limit and cell_len(escaped := printable(text)) <= limit:
        return escaped
    room = max(limit - 3, 0)
    start, end = printable(text[: (room + 1) // 2]), printable(text[len(text) - room // 2 :])
    while cell_len(start) > (room + 1) // 2:
        start = start[:-1]
    while cell_len(end) > room // 2:
        end = end[1:]
    return f"{start}{'...'[:limit]}{end}"


def filled(code: str, folder: object) -> str:
    """Lines of Python in which "{folder}" stands for a name; they are valid, whatever characters
    the name has.
    """
    text = str(folder)
    return code.format(folder=json.dumps(text, ensure_ascii=not text.isprintable())[1:-1])


def listed(names: Iterable[object], most: int = 3) -> str:
    """ "a, b, c and 4 more"; "nothing" where there are none."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(shown(name, 120) for name in names[:most]) or "nothing") + more


def one_line(error: BaseException) -> str:
    """The message of any exception, on one line: what a library said, without its layout."""
    return printable(" ".join(str(error)[:MOST_SAID].split()) or type(error).__name__)
