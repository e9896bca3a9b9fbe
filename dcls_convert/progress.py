"""Show progress on stderr: a bar with the time left on a terminal, elsewhere a line per step."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from .text import printable, shortened

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger("dcls_convert")  # says at DEBUG how each layer convolves
SECONDS_UNSEEN = 2.0  # shorter calls from Python show no progress
SECONDS_BETWEEN_LINES = 10.0  # of a step with a total, if there is no bar
BAR_WIDTH = 16  # terminal columns
# A callback for messages to the user.
Note = Callable[[str], None]


class Notify(Protocol):
    """A callback that reports progress.

    The callback gets the text of the step, the amount done, and the total, in any common unit. A
    total of 0 means that the total is unknown.
    """

    def __call__(self, text: str, done: int = 0, total: int = 0, /) -> None: ...


def ignore_messages(text: str, done: int = 0, total: int = 0, /) -> None:
    """A `Notify`, or a `Note`, that shows nothing."""


@contextlib.contextmanager
def show_progress(name: str, *, wait: float = 0.0, redirect: bool = False) -> Iterator[Notify]:
    """Show progress until the block ends.

    Args:
        name: The task that the steps belong to; shown before each step.
        wait: Seconds at the start in which nothing is shown.
        redirect: Replace sys.stdout and sys.stderr, so that other output appears above the bar.
    """
    name = shortened(name)
    bar = _bar(name, redirect)
    if bar is not None and not wait:
        bar.start()
    first_time = time.monotonic() + wait
    next_line_time = first_time

    def step(text: str, done: int = 0, total: int = 0, /) -> None:
        nonlocal next_line_time
        now = time.monotonic()
        line = printable(f"{name}: {text}")
        if now < first_time:
            return
        if bar is not None:
            _show_on_bar(bar, line, done, total)
        elif not total or now >= next_line_time:
            next_line_time = now + SECONDS_BETWEEN_LINES
            print(line, file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        if bar is not None:
            bar.stop()


def _bar(name: str, redirect: bool) -> "Progress | None":
    """Return a bar with the time left, or None without a terminal. It disappears at the end."""
    console = Console(stderr=True, highlight=False, force_jupyter=False)
    if not _is_stderr_a_terminal() or console.is_dumb_terminal:
        return None
    from rich import progress
    from rich.table import Column

    bar = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        progress.BarColumn(BAR_WIDTH),  # pulses if the total is unknown
        progress.TimeRemainingColumn(
            elapsed_when_finished=True,
            table_column=Column(min_width=len("0:00:00")),  # keeps the bar in place
        ),
        console=console,
        transient=True,
        redirect_stdout=redirect,
        redirect_stderr=redirect,
        speed_estimate_period=600,
        expand=True,
    )
    bar.add_task(name, total=None)
    return bar


def _show_on_bar(bar: "Progress", text: str, done: int, total: int) -> None:
    if bar.tasks[0].total != (total or None):  # a new task, since the total changed
        bar.remove_task(bar.task_ids[0])
        bar.add_task(text, total=total or None)
    bar.update(bar.task_ids[0], description=text, completed=done)
    bar.start()


def show_progress_in_python(
    name: str, progress: bool | None
) -> contextlib.AbstractContextManager[Notify]:
    """Show progress of a call from Python that takes more than SECONDS_UNSEEN.

    If `progress` is None, show it only on a terminal or in a notebook.
    """
    if progress is None:
        progress = "ipykernel" in sys.modules or _is_stderr_a_terminal()
    if not progress:
        return contextlib.nullcontext(ignore_messages)
    return show_progress(name, wait=SECONDS_UNSEEN)


def _is_stderr_a_terminal() -> bool:
    """True if stderr is a terminal. rich would also say so if FORCE_COLOR is set, as in CI runs."""
    return sys.stderr is not None and sys.stderr.isatty()
