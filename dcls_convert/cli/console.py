"""The one way to print: results to stdout, messages and progress to stderr.

Control characters that came from data are escaped.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import typer
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from ..errors import DclsConvertError
from ..progress import LOG, Notify, show_progress, silent
from ..text import printable, shown

LOG_VARIABLE = "DCLS_CONVERT_LOG"
EXIT_UNPRINTED = 1  # stdout is closed or full
WIDTH_IN_A_FILE = 160  # columns of wide tables; most of their rows stay on one line
interrupts: list[int] = []  # numbers of the signals that came


class OutputError(DclsConvertError):
    """The results cannot be printed."""

    exit_code = EXIT_UNPRINTED


def set_up() -> None:
    """Prepare stdout and stderr, and ignore a width of 0 in COLUMNS.

    Characters that the streams' encodings lack will be replaced (cp1252 has no arrow).
    """
    columns = os.environ.get("COLUMNS", "80")
    if not columns.strip("0"):
        # A terminal that does not know its width states 0, and rich would print nothing.
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class _Messages(logging.Handler):
    """Prints each record of a log as a message."""

    def emit(self, record: logging.LogRecord) -> None:
        message(f"{record.levelname.lower()}: {record.getMessage()}", style="dim")


_MESSAGES = _Messages()


def log_if_asked() -> None:
    """Print what the package logs, if the environment variable DCLS_CONVERT_LOG says "debug"."""
    level = os.environ.get(LOG_VARIABLE, "")
    if not level:
        return
    if level.lower() != "debug":
        raise DclsConvertError(f"environment: {LOG_VARIABLE}={shown(level)!r} must be debug")
    LOG.setLevel(logging.DEBUG)
    LOG.addHandler(_MESSAGES)


def show(*parts: RenderableType, wide: bool = False) -> None:
    """Print lines, or what rich lays out.

    Tables fit the terminal. In a file, `wide` ones have WIDTH_IN_A_FILE columns.
    """
    with _results() as stdout:
        stdout.write(_rendered(stdout, *parts, wide=wide))


def write(text: str) -> None:
    """Print a text of several lines to stdout, as it is."""
    with _results() as stdout:
        stdout.write(printable(text, keep="\n\t"))


def message(text: str, style: str = "") -> None:
    """Print one line to stderr."""
    if sys.stderr is None:  # the shell closed it
        return
    try:
        sys.stderr.write(_rendered(sys.stderr, Text(printable(text), style=style)))
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def note(text: str) -> None:
    """A `Note`: print what the user should know."""
    message(f"note: {text}", style="yellow")


@contextlib.contextmanager
def steps(
    name: object, first: str = "", *, quiet: bool = False, lines: bool = True, every: float = 0.0
) -> Iterator[Notify]:
    """Show what is being done, as `show_progress`.

    Args:
        name: What the steps belong to.
        first: The first step, shown while the block imports its modules for some seconds.
        quiet: Show nothing.
        lines: Write lines where stderr is no terminal.
        every: Least seconds between two lines, for steps with a total.
    """
    progress: contextlib.AbstractContextManager[Notify]
    if quiet:
        progress = contextlib.nullcontext(silent)
    else:
        write_line = message if lines else silent
        progress = show_progress(str(name), every=every, line=write_line, redirect=True)
    # What models and their loaders print meanwhile is progress too.
    with progress as notify, contextlib.redirect_stdout(sys.stderr):

        def step(text: str, done: int = 0, total: int = 0, /) -> None:
            if interrupts:  # a library has swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            notify(text, done, total)

        if first:
            step(first)
        yield step


def finish() -> None:
    """Flush stdout; if that fails, drop the rest, or Python would complain of it at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)


def _rendered(stream: TextIO, *parts: RenderableType, wide: bool = False) -> str:
    """What rich would write to the stream, with control characters escaped.

    The layout's line ends and colours stay.
    """
    console = Console(file=stream, highlight=False)
    if wide and not console.is_terminal:
        console.width = max(console.width, WIDTH_IN_A_FILE)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, str):
                part = Text(printable(part))
            options = console.options
            if isinstance(part, Text):
                options = options.update(no_wrap=True, overflow="ignore")
            escaped = []
            for text, style, _ in console.render(part, options):
                escaped.append(Segment(printable(text, keep="\n"), style))
            console.print(Segments(escaped), soft_wrap=True)
    return captured.get()


@contextlib.contextmanager
def _results() -> Iterator[TextIO]:
    """stdout, to write results to.

    Raises:
        OutputError: stdout is closed, or cannot be written.
        typer.Exit: Its reader has gone.
    """
    if sys.stdout is None:
        raise OutputError("the results cannot be printed: stdout is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        _drop(sys.stdout)
        raise typer.Exit(EXIT_UNPRINTED) from None
    except OSError as error:
        _drop(sys.stdout)
        raise OutputError(f"the results cannot be printed: {error.strerror}") from error


def _drop(stream: TextIO) -> None:
    """Discard what is left in the stream's buffer."""
    with contextlib.suppress(OSError):  # in tests, streams have no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
