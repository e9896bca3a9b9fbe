"""What is being done, on stderr: a bar with the time left on a terminal, a line a step elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich import progress
from rich.console import Console

from .errors import printable, shown

SECONDS_UNSEEN = 2.0  # in Python; what takes less shows nothing
BAR_WIDTH = 16  # columns
TEXT_LEAST, BESIDE_TEXT = 20, BAR_WIDTH + 11  # columns: of the text, and of spinner, bar and time


class Notify(Protocol):
    """Told what is done next, and how much of all is done, in any unit (0 of 0: not known); or a
    note to the user.
    """

    def __call__(self, text: str, done: int = 0, total: int = 0, /) -> None: ...


def silent(text: str, done: int = 0, total: int = 0, /) -> None:
    """A `Notify` that shows nothing."""


def _print_line(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_progress(
    name: str,
    *,
    wait: float = 0.0,
    every: float = 0.0,  # seconds at least between lines of counted steps
    line: Callable[[str], None] = _print_line,
    # Replace sys.stdout and sys.stderr, so that what others print appears above the bar.
    redirect: bool = False,
) -> Iterator[Notify]:
    """Show steps until the block ends, but nothing before `wait` seconds."""
    console = Console(stderr=True, highlight=False, force_jupyter=False)
    bar = console.is_terminal and not console.is_dumb_terminal
    display = _Bar(shown(name), console, redirect) if bar else _Lines(shown(name), every, line)
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


def is_watched() -> bool:
    """Whether somebody may be looking at stderr: on a terminal or in a notebook."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


class _Bar(progress.Progress):
    def __init__(self, name: str, console: Console, redirect: bool) -> None:
        super().__init__(
            console=console,
            transient=True,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
            speed_estimate_period=600,
        )
        self._name, self._room = name, max(TEXT_LEAST, console.width - BESIDE_TEXT)
        self._begin(None)

    def _begin(self, total: int | None) -> None:
        """Steps of another kind, of which those that are counted have a bar and the time left."""
        for task in self.task_ids:
            self.remove_task(task)
        timed = [
            progress.BarColumn(BAR_WIDTH),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
        ]
        text = progress.TextColumn("{task.description}", markup=False)
        self.columns = (
            progress.SpinnerColumn(),
            text,
            *(timed if total else [progress.TimeElapsedColumn()]),
        )
        self.add_task(self._name, total=total)

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        if (total or None) != self.tasks[0].total:
            self._begin(total or None)
        self.update(
            self.tasks[0].id, description=shown(f"{self._name}: {text}", self._room), completed=done
        )


class _Lines:
    def __init__(self, name: str, every: float, line: Callable[[str], None]) -> None:
        self._name, self._every, self._line = name, every, line
        self._started, self._text, self._said = False, "", -every

    def start(self) -> None:
        self._started = True
        if self._text:
            self._say()

    def stop(self) -> None:
        self._started = False

    def step(self, text: str, done: int = 0, total: int = 0, /) -> None:
        self._text = text
        if self._started and not (total and time.monotonic() - self._said < self._every):
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        self._line(f"{self._name}: {self._text}")
