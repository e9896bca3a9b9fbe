"""Show progress on stderr: a bar with the time left on a terminal, elsewhere a line per step."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich import progress
from rich.console import Console

from .text import printable, shortened

logger = logging.getLogger("dcls_convert")  # logs each decision, at DEBUG
SECONDS_UNSEEN = 2.0  # calls from Python that take less show no progress
BAR_WIDTH = 16  # columns
MIN_TEXT_WIDTH = 20  # columns
BESIDE_TEXT = BAR_WIDTH + 11  # columns of spinner, bar and time


# A callback for messages to the user.
Note = Callable[[str], None]


class Notify(Protocol):
    """A callback that reports progress.

    It is called with the next step, and with how much of the total is done, in any unit. A total of
    0 means that the total is unknown.
    """

    def __call__(self, text: str, done: int = 0, total: int = 0, /) -> None: ...


def ignore_messages(text: str, done: int = 0, total: int = 0, /) -> None:
    """A `Notify`, or a `Note`, that shows nothing."""


def _print_line(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_progress(
    name: str,
    *,
    wait: float = 0.0,
    every: float = 0.0,
    write_line: Callable[[str], None] = _print_line,
    redirect: bool = False,
) -> Iterator[Notify]:
    """Show progress until the block ends.

    Args:
        name: The task that the steps belong to; shown before each step.
        wait: Seconds before anything is shown.
        every: Minimum seconds between two lines, for steps with a total.
        write_line: Writes a line if there is no bar.
        redirect: Replace sys.stdout and sys.stderr, so that other output appears above the bar.
    """
    console = Console(stderr=True, highlight=False, force_jupyter=False)
    display: _Bar | _Lines
    if _is_stderr_a_terminal() and not console.is_dumb_terminal:
        display = _Bar(shortened(name), console, redirect)
    else:
        display = _Lines(shortened(name), every, write_line)
    timer = threading.Timer(wait, display.start)
    timer.daemon = True
    if wait:
        timer.start()
    else:
        display.start()
    try:
        yield display.step
    finally:
        timer.cancel()
        if wait:
            timer.join()
        display.stop()


def show_progress_in_python(
    name: str, progress: bool | None
) -> contextlib.AbstractContextManager[Notify]:
    """Show progress of a call from Python, if it takes more than SECONDS_UNSEEN.

    Args:
        name: The task that the steps belong to; shown before each step.
        progress: Whether to show progress; None shows it if somebody may be looking at stderr.
    """
    if progress is None:
        progress = is_stderr_watched()
    if not progress:
        return contextlib.nullcontext(ignore_messages)
    return show_progress(name, wait=SECONDS_UNSEEN)


def is_stderr_watched() -> bool:
    """True if somebody may be looking at stderr: on a terminal or in a notebook."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


def _is_stderr_a_terminal() -> bool:
    """True if frames of a progress bar can overwrite each other on stderr.

    rich assumes a terminal if FORCE_COLOR is set, as ipykernel and many CIs do, but their output
    keeps every frame.
    """
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    return not is_notebook and bool(sys.stderr and sys.stderr.isatty())


class _Bar(progress.Progress):
    """A progress bar with the latest step; it disappears at the end."""

    def __init__(self, name: str, console: Console, redirect: bool) -> None:
        super().__init__(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(BAR_WIDTH),  # without a total, it moves to and fro
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
            speed_estimate_period=600,
        )
        self._name = name
        self._text_width = max(MIN_TEXT_WIDTH, console.width - BESIDE_TEXT)
        self.add_task(name, total=None)

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        if self.tasks[0].total != (total or None):  # begins steps with another total
            self.remove_task(self.task_ids[0])
            self.add_task(self._name, total=total or None)
        description = shortened(f"{self._name}: {text}", self._text_width)
        self.update(self.task_ids[0], description=description, completed=done)


class _Lines:
    """Writes a line for each step; `start` writes the last step that came before it."""

    def __init__(self, name: str, every: float, write_line: Callable[[str], None]) -> None:
        self._name = name
        self._every = every
        self._write_line = write_line
        self._started = False
        self._text = ""
        self._time_of_last_line = -every

    def start(self) -> None:
        self._started = True
        if self._text:
            self.step(self._text)

    def stop(self) -> None:
        self._started = False

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        self._text = text
        now = time.monotonic()
        too_soon = bool(total) and now - self._time_of_last_line < self._every
        if self._started and not too_soon:
            self._time_of_last_line = now
            self._write_line(f"{self._name}: {text}")
