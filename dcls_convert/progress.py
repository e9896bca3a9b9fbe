"""Progress on stderr: a bar with the time left on a terminal, a line for each step elsewhere."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich import progress
from rich.console import Console

from .text import printable, shown

LOG = logging.getLogger("dcls_convert")  # at DEBUG: each decision
SECONDS_UNSEEN = 2.0  # calls from Python that take less show no progress
BAR_WIDTH = 16  # columns
MIN_TEXT_WIDTH = 20  # columns
BESIDE_TEXT = BAR_WIDTH + 11  # columns of spinner, bar and time


# A callback for what the user should know.
Note = Callable[[str], None]


class Notify(Protocol):
    """A callback for progress.

    It is called with what is done next, and how much of the total is done, in any unit. A total of
    0 says that this is not known.
    """

    def __call__(self, text: str, done: int = 0, total: int = 0, /) -> None: ...


def silent(text: str, done: int = 0, total: int = 0, /) -> None:
    """A `Notify`, or a `Note`, that shows nothing."""


def _print_line(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_progress(
    name: str,
    *,
    wait: float = 0.0,
    every: float = 0.0,
    line: Callable[[str], None] = _print_line,
    redirect: bool = False,
) -> Iterator[Notify]:
    """Show progress until the block ends.

    Args:
        name: What the steps belong to; stands before each.
        wait: Seconds during which nothing is shown.
        every: Least seconds between two lines, for steps with a total.
        line: Writes a line, where there is no bar.
        redirect: Replace sys.stdout and sys.stderr, so that what others print appears above the
            bar.
    """
    console = Console(stderr=True, highlight=False, force_jupyter=False)
    display: _Bar | _Lines
    if _is_stderr_a_terminal() and not console.is_dumb_terminal:
        display = _Bar(shown(name), console, redirect)
    else:
        display = _Lines(shown(name), every, line)
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


def show_to_python(name: str, progress: bool | None) -> contextlib.AbstractContextManager[Notify]:
    """Show progress of a call from Python, if it takes more than SECONDS_UNSEEN.

    Args:
        name: What the steps belong to; stands before each.
        progress: Whether to show it; None: if somebody may be looking at stderr.
    """
    if progress is None:
        progress = is_stderr_watched()
    if not progress:
        return contextlib.nullcontext(silent)
    return show_progress(name, wait=SECONDS_UNSEEN)


def is_stderr_watched() -> bool:
    """Whether somebody may be looking at stderr: on a terminal or in a notebook."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


def _is_stderr_a_terminal() -> bool:
    """Whether frames can overwrite each other there.

    rich takes FORCE_COLOR for a terminal, which ipykernel and many CIs set; their streams keep
    every frame.
    """
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    return not is_notebook and bool(sys.stderr and sys.stderr.isatty())


class _Bar(progress.Progress):
    """A bar with the latest step, which disappears at the end."""

    def __init__(self, name: str, console: Console, redirect: bool) -> None:
        super().__init__(
            console=console,
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
            speed_estimate_period=600,
        )
        self._name = name
        self._text_width = max(MIN_TEXT_WIDTH, console.width - BESIDE_TEXT)
        self._begin(None)

    def _begin(self, total: int | None) -> None:
        """Begin steps with another total; those with a total have a bar and the time left."""
        for task in self.task_ids:
            self.remove_task(task)
        spinner = progress.SpinnerColumn()
        text = progress.TextColumn("{task.description}", markup=False)
        if total:
            bar = progress.BarColumn(BAR_WIDTH)
            time_left = progress.TimeRemainingColumn(elapsed_when_finished=True)
            self.columns = (spinner, text, bar, time_left)
        else:
            self.columns = (spinner, text, progress.TimeElapsedColumn())
        self.add_task(self._name, total=total)

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        known_total = total or None
        if known_total != self.tasks[0].total:
            self._begin(known_total)
        description = shown(f"{self._name}: {text}", self._text_width)
        self.update(self.tasks[0].id, description=description, completed=done)


class _Lines:
    """A line for each step; the last step before `start` is written by it."""

    def __init__(self, name: str, every: float, line: Callable[[str], None]) -> None:
        self._name = name
        self._every = every
        self._line = line
        self._started = False
        self._text = ""
        self._time_of_last_line = -every

    def start(self) -> None:
        self._started = True
        if self._text:
            self._write()

    def stop(self) -> None:
        self._started = False

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        self._text = text
        too_soon = time.monotonic() - self._time_of_last_line < self._every
        if self._started and not (total and too_soon):
            self._write()

    def _write(self) -> None:
        self._time_of_last_line = time.monotonic()
        self._line(f"{self._name}: {self._text}")
