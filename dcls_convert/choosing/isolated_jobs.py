"""Run jobs in worker processes. If a worker crashes or hangs, its job fails and it is replaced."""

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from ..text import one_line

SECONDS_BETWEEN_CHECKS = 1.0  # how often to check whether the pool is broken


def run_jobs(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    timeout: float | None = None,
    set_up: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Any, str | None]]:
    """Call `function` with every job, in worker processes.

    Args:
        function: Must be picklable.
        jobs: Must be picklable.
        workers: Maximum number of processes.
        timeout: Seconds for one job, without the start of its worker; None for no limit.
        set_up: Called once in each worker, before its first job.

    Yields:
        (index, result, failure) of each job as soon as it is done. If the job failed, `result` is
        None and `failure` says why, in one line; otherwise `failure` is None.
    """
    jobs_left = dict(enumerate(jobs))
    has_progress = True
    # A pool breaks if a worker dies while it has no job. A new pool then takes over, unless the
    # broken one has not finished a single job.
    while jobs_left and has_progress:
        jobs_before = len(jobs_left)
        with _new_pool(min(workers, jobs_before), set_up) as pool:
            indices, done = _schedule(pool, function, jobs_left, timeout)
            while jobs_left and pool.active:
                try:
                    future = done.get(timeout=SECONDS_BETWEEN_CHECKS)
                    result, failure = _result(future, timeout)
                except (Empty, BrokenProcessPool):
                    continue
                index = indices[future]
                del jobs_left[index]
                yield index, result, failure
        has_progress = len(jobs_left) < jobs_before
    for index in jobs_left:
        yield index, None, "the worker processes died before they took a job"


@contextlib.contextmanager
def _new_pool(workers: int, set_up: Callable[[], None] | None) -> Iterator[ProcessPool]:
    """Start a pool, and stop it at the end of the block whatever its workers are doing."""
    context = multiprocessing.get_context("spawn")  # torch's thread pool does not survive a fork
    pool = ProcessPool(workers, initializer=_start_worker, initargs=(set_up,), context=context)
    try:
        yield pool
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()


def _schedule(
    pool: ProcessPool,
    function: Callable[[Any], Any],
    jobs: Mapping[int, Any],
    timeout: float | None,
) -> tuple[dict[Future[Any], int], "SimpleQueue[Future[Any]]"]:
    """Schedule all jobs. Return the index of each future's job, and the queue of done futures."""
    indices: dict[Future[Any], int] = {}
    with _sigint_blocked():
        for index, job in jobs.items():
            indices[pool.schedule(_call, (function, job), timeout=timeout)] = index
    done: SimpleQueue[Future[Any]] = SimpleQueue()
    for future in indices:
        future.add_done_callback(done.put)
    return indices, done


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in all threads and processes that are started inside the block.

    Otherwise Ctrl-C would also stop the workers, since a terminal sends the signal to all of them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Start the tracker now; started later it would reset the signal mask (CPython 3.11).
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _result(future: Future[Any], timeout: float | None) -> tuple[Any, str | None]:
    """Return (result, None), or (None, why the job failed)."""
    try:
        return future.result()  # type: ignore[no-any-return]
    except TimeoutError:
        return None, f"took longer than {timeout:g} s"
    except ProcessExpired as error:
        if error.exitcode >= 0:
            return None, f"its process ended by itself, with exit code {error.exitcode}"
        name = signal.Signals(-error.exitcode).name
        if name == "SIGKILL":
            return None, f"its process was killed by {name} (out of memory?)"
        return None, f"its process was killed by {name}"


def _start_worker(set_up: Callable[[], None] | None) -> None:
    """Set up a worker, in its own process, before its first job.

    The worker prints nothing. It ends at once on SIGTERM, and when its parent ends.
    """
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


def _call(function: Callable[[Any], Any], job: Any) -> tuple[Any, str | None]:
    """Run a job inside a worker. Return (result, None), or (None, why the job failed)."""
    try:
        return function(job), None
    except BaseException as error:  # even SystemExit fails only the job, not its worker
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
        return None, f"{type(error).__name__}: {one_line(error)[:300]}{place}"
