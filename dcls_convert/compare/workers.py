"""Jobs in worker processes that may crash or hang: such a job fails alone, and a new worker takes
over."""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from ..errors import one_line

SECONDS_TO_LOOK = 1.0  # between two looks at whether the pool is still whole


def run_jobs(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    timeout: float | None = None,  # seconds for one job, without the start of its worker
    set_up: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Any, str | None]]:
    """Of every job, as soon as it is done: its index, what `function` returned, and one line if it
    failed instead."""
    left, before = dict(enumerate(jobs)), 0
    while (
        left and len(left) != before
    ):  # a pool breaks when a worker dies without a job; the next pool takes over
        before = len(left)
        context = multiprocessing.get_context(
            "spawn"
        )  # not "fork": a copy of torch's thread pool does not work
        pool = ProcessPool(
            min(workers, len(left)), initializer=_start_worker, initargs=(set_up,), context=context
        )
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        try:
            with _without_ctrl_c():
                futures: dict[Future[Any], int] = {
                    pool.schedule(_answer, (function, job), timeout=timeout): index
                    for index, job in left.items()
                }
            for each in futures:
                each.add_done_callback(done.put)
            while left and pool.active:
                with contextlib.suppress(Empty, BrokenProcessPool):
                    future = done.get(timeout=SECONDS_TO_LOOK)
                    result, index = _result(future, timeout), futures[future]
                    del left[index]
                    yield index, *result
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()
    for index in left:
        yield index, None, "the worker processes died before they took a job"


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Threads and processes that start inside do not get SIGINT, which a terminal sends to the
    workers too."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # would unblock the signal if it started later (CPython 3.11)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _result(future: Future[Any], timeout: float | None) -> tuple[Any, str | None]:
    try:
        return future.result()  # type: ignore[no-any-return]
    except TimeoutError:
        return None, f"took longer than {timeout:g} s"
    except ProcessExpired as error:
        if error.exitcode >= 0:
            return None, f"its process ended by itself, with exit code {error.exitcode}"
        name = signal.Signals(-error.exitcode).name
        return None, f"its process was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")


def _start_worker(set_up: Callable[[], None] | None) -> None:
    """In the worker, before its first job: it ends at once when it is told to or the parent is
    gone, and is silent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if set_up is not None:
        set_up()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(function: Callable[[Any], Any], job: Any) -> tuple[Any, str | None]:
    """In the worker: the function's value, or one line that says why it failed."""
    try:
        return function(job), None
    except BaseException as error:  # SystemExit too: the job has failed, its worker has not
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        return None, f"{type(error).__name__}: {one_line(error)[:300]}{place}"
