"""Print for all commands: results to stdout, messages and progress to stderr.

Control characters in data are escaped.
"""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from ..progress import Notify, ignore_messages, show_progress
from ..text import printable

WIDTH_IN_A_FILE = 160  # columns of wide tables; most rows then fit on one line


def show(*parts: RenderableType, wide: bool = False) -> None:
    """Print lines of text, tables, and whatever else rich can lay out.

    Tables fit the terminal. In a file, `wide` tables have at least WIDTH_IN_A_FILE columns.
    """
    console = Console(highlight=False)
    if wide and not console.is_terminal:
        console.width = max(console.width, WIDTH_IN_A_FILE)
    for part in parts:
        if isinstance(part, str):
            part = Text(printable(part))
        console.print(part, soft_wrap=isinstance(part, Text), crop=False)


def write(text: str) -> None:
    """Print a text, which may have several lines, to stdout; control characters are escaped."""
    print(printable(text, keep="\n\t"), end="", flush=True)


def error(line: str) -> None:
    """Print an error, to stderr."""
    _message(f"error: {line}", style="red")


def note(text: str) -> None:
    """Print a note for the user, to stderr; this function is a `Note`."""
    _message(f"note: {text}", style="yellow")


@contextlib.contextmanager
def steps(name: object, first: str = "", *, quiet: bool = False) -> Iterator[Notify]:
    """Show progress as `show_progress` does, and yield the function that reports a step.

    Args:
        name: What the steps belong to, such as a model; printed before each step.
        first: First step, shown while the block imports its modules, which takes seconds.
    """
    progress: contextlib.AbstractContextManager[Notify] = contextlib.nullcontext(ignore_messages)
    if not quiet:
        progress = show_progress(str(name), redirect=True)
    # Models and their loaders may print to stdout. Move these lines to stderr: they are not
    # results.
    with contextlib.redirect_stdout(sys.stderr), progress as notify:
        if first:
            notify(first)
        yield notify


def _message(text: str, style: str) -> None:
    """Print one line to stderr, above a progress bar. `steps` redirects sys.stderr for this."""
    console = Console(stderr=True, highlight=False)
    with console.capture() as captured:
        console.print(Text(printable(text), style=style), soft_wrap=True)
    print(captured.get(), end="", file=sys.stderr, flush=True)
