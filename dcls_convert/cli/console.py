"""The one way to print: results to stdout, messages and progress to stderr, control characters of data escaped."""

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

from ..errors import DclsConvertError, printable, shown
from ..progress import LOG, Notify, show_progress, silent

LOG_VARIABLE = "DCLS_CONVERT_LOG"
EXIT_UNPRINTED = 1  # where stdout is closed or full
WIDTH_IN_A_FILE = 160  # columns of wide tables; most of their rows stay on one line
interrupts: list[int] = []  # signals that came


class OutputError(DclsConvertError):
    """The results cannot be printed."""

    exit_code = EXIT_UNPRINTED


def set_up() -> None:
    """Let stdout and stderr replace what their encodings lack (cp1252 has no arrow) instead of failing."""
    if not os.environ.get("COLUMNS", "80").strip(
        "0"
    ):  # of a terminal that does not know; rich would print nothing
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
    """Print lines, or what rich lays out: tables fit the terminal; in a file, those of many columns are `wide`."""
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


def note(text: str, *_: int) -> None:
    """A `Notify` for what a user should know."""
    message(f"note: {text}", style="yellow")


@contextlib.contextmanager
def steps(
    name: object, first: str = "", *, quiet: bool = False, lines: bool = True, every: float = 0.0
) -> Iterator[Notify]:
    """Show what is being done, as `show_progress`; nothing when quiet, and on terminals alone without `lines`.

    What is told first begins with imports of some seconds.
    """
    # What models and their loaders print meanwhile is progress too.
    loud = show_progress(str(name), every=every, line=message if lines else silent, redirect=True)
    with (
        contextlib.nullcontext(silent) if quiet else loud as notify,
        contextlib.redirect_stdout(sys.stderr),
    ):

        def step(text: str, done: int = 0, total: int = 0, /) -> None:
            if interrupts:  # and a library has swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            notify(text, done, total)

        if first:
            step(first)
        yield step


def finish() -> None:
    """Flush; where stdout takes nothing, Python must not try again at its end and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)


def _rendered(stream: TextIO, *parts: RenderableType, wide: bool = False) -> str:
    """What rich would write to the stream, with control characters escaped; the layout's line ends and colours stay."""
    console = Console(file=stream, highlight=False)
    if wide and not console.is_terminal:
        console.width = max(console.width, WIDTH_IN_A_FILE)
    with console.capture() as captured:
        for part in parts:
            part = Text(printable(part)) if isinstance(part, str) else part
            options = console.options
            if isinstance(part, Text):
                options = options.update(no_wrap=True, overflow="ignore")
            segments = console.render(part, options)
            console.print(
                Segments(
                    [Segment(printable(text, keep="\n"), style) for text, style, _ in segments]
                ),
                soft_wrap=True,
            )
    return captured.get()


@contextlib.contextmanager
def _results() -> Iterator[TextIO]:
    """stdout; where it takes nothing, that is an error of its own."""
    if sys.stdout is None:
        raise OutputError("the results cannot be printed: stdout is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough, as in `| head`
        _drop(sys.stdout)
        raise typer.Exit(EXIT_UNPRINTED) from None
    except OSError as error:
        _drop(sys.stdout)
        raise OutputError(f"the results cannot be printed: {error.strerror}") from error


def _drop(stream: TextIO) -> None:
    """Send to nowhere what is left in the stream's buffer."""
    with contextlib.suppress(OSError):  # no descriptor, as in tests
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
