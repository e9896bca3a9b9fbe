"""Printing of all commands: results go to stdout, messages and progress to stderr.

Control characters in data are escaped.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from ..errors import DclsConvertError
from ..progress import Notify, ignore_messages, logger, show_progress
from ..text import printable

LOG_VARIABLE = "DCLS_CONVERT_LOG"
EXIT_UNPRINTED = 1  # stdout is closed or full
WIDTH_IN_A_FILE = 160  # columns of wide tables; most rows then fit on one line
interrupts: list[int] = []  # numbers of the signals received
# Bytes of a file's name that are not UTF-8, as Python reads them (PEP 383).
NOT_UTF8 = "".join(map(chr, range(0xDC80, 0xDD00)))


class OutputError(DclsConvertError):
    """The results cannot be printed."""

    exit_code = EXIT_UNPRINTED


def set_up() -> None:
    """Make stdout take any text: what its encoding lacks, as cp1252 lacks arrows, becomes "?"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _MessageHandler(logging.Handler):
    """Print each log record as a message."""

    def emit(self, record: logging.LogRecord) -> None:
        message(f"{record.levelname.lower()}: {record.getMessage()}", style="dim")


_MESSAGE_HANDLER = _MessageHandler()


def log_if_asked() -> None:
    """Print what the package logs, if the environment variable DCLS_CONVERT_LOG is set."""
    if os.environ.get(LOG_VARIABLE):
        logger.setLevel(logging.DEBUG)
        logger.addHandler(_MESSAGE_HANDLER)


def show(*parts: RenderableType, wide: bool = False) -> None:
    """Print lines of text, tables, and whatever else rich can lay out.

    Tables fit the terminal. In a file they have at least WIDTH_IN_A_FILE columns if `wide`.
    """
    with _results() as stdout:
        stdout.write(_render(stdout, *parts, wide=wide))


def write(text: str) -> None:
    """Print a text, which may have several lines, to stdout; control characters are escaped."""
    with _results() as stdout:
        stdout.write(printable(text, keep="\n\t"))


def show_path(path: object) -> None:
    """Print a path for a script, encoded as in the file system: any byte stays as it is."""
    with _results() as stdout:
        if isinstance(stdout, io.TextIOWrapper):
            stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
        stdout.write(printable(path, keep=NOT_UTF8) + "\n")


def message(text: str, style: str = "") -> None:
    """Print one line to stderr."""
    if sys.stderr is None:  # the shell closed it
        return
    try:
        sys.stderr.write(_render(sys.stderr, Text(printable(text), style=style)))
        sys.stderr.flush()
    except OSError:
        _discard_buffer(sys.stderr)


def error(line: str) -> None:
    """Print an error, to stderr."""
    message(f"error: {line}", style="red")


def note(text: str) -> None:
    """Print what the user should know, to stderr; this function is a `Note`."""
    message(f"note: {text}", style="yellow")


@contextlib.contextmanager
def steps(
    name: object, first: str = "", *, quiet: bool = False, lines: bool = True, every: float = 0.0
) -> Iterator[Notify]:
    """Show progress as `show_progress` does, and yield the function that reports a step.

    Args:
        name: What the steps belong to, such as a model; printed before each step.
        first: First step, shown while the block imports its modules, which takes seconds.
        lines: If stderr is not a terminal, write a line for each step.
        every: Minimum number of seconds between two lines, for steps with a total.
    """
    progress: contextlib.AbstractContextManager[Notify]
    if quiet:
        progress = contextlib.nullcontext(ignore_messages)
    else:
        write_line = message if lines else ignore_messages
        progress = show_progress(str(name), every=every, write_line=write_line, redirect=True)
    # Models and their loaders may print to stdout, but what they print is not a result.
    with contextlib.redirect_stdout(sys.stderr), progress as notify:

        def step(text: str, done: int = 0, total: int = 0, /) -> None:
            if interrupts:  # a library has swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            notify(text, done, total)

        if first:
            step(first)
        yield step


def _render(stream: TextIO, *parts: RenderableType, wide: bool = False) -> str:
    """Return what rich would write to the stream; parts that are not str are escaped already."""
    console = Console(file=stream, highlight=False)
    if wide and not console.is_terminal:
        console.width = max(console.width, WIDTH_IN_A_FILE)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, str):
                part = Text(printable(part))
            console.print(part, soft_wrap=isinstance(part, Text), crop=False)
    return captured.get()


@contextlib.contextmanager
def _results() -> Iterator[TextIO]:
    """Yield stdout to write results to, and flush it.

    Raises:
        OutputError: stdout is closed or cannot be written to.
        typer.Exit: The reader of stdout has gone.
    """
    if sys.stdout is None:
        raise OutputError("the results cannot be printed: stdout is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        _discard_buffer(sys.stdout)
        raise typer.Exit(EXIT_UNPRINTED) from None
    except OSError as error:
        _discard_buffer(sys.stdout)
        raise OutputError(f"the results cannot be printed: {error.strerror}") from error


def _discard_buffer(stream: TextIO) -> None:
    """Discard what is left in the stream's buffer, or Python would report an error at exit."""
    with contextlib.suppress(OSError):  # in tests, streams have no descriptor
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)
