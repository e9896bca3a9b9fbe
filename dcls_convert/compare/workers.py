"""Jobs in worker processes that may crash or hang: such a job fails alone, and a new worker takes over."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from ..errors import one_line, printable

SECONDS_TO_LOOK = 1.0  # between two looks at whether the pool is still whole
SECONDS_TO_WEIGH = 0.1  # between two looks at a worker's memory, which grows by some hundred MB meanwhile
MOST_MEMORY = 4 << 30  # bytes of one worker; the models of both registries, which have no weights here, need 0.8 GB


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one job."""

    index: int  # of the job
    value: Any = None  # what the function returned
    failure: str | None = None  # one line that names the cause; None where the function returned


def run_jobs(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    timeout: float | None = None,
    set_up: Callable[[], None] | None = None,
) -> Iterator[Outcome]:
    """Call `function` for every job in processes of their own; one outcome a job, each as soon as it is ready.

    When the iterator ends, is closed or is interrupted (KeyboardInterrupt), it ends all workers.

    Args:
        function: Importable from a module, as is `set_up`. What it takes and returns can be pickled.
        jobs: The arguments, one for each call.
        workers: How many processes at most.
        timeout: Seconds for one job; the start of its worker does not count.
        set_up: Called once in every process, before its first job.
    """
    left = dict(enumerate(jobs))
    before = 0
    while left and len(left) != before:  # a pool breaks when a worker dies at its start; the next one takes over
        before = len(left)
        pool = ProcessPool(
            min(workers, len(left)),
            initializer=partial(_start_worker, set_up, MOST_MEMORY),
            # Not "fork": a copy of torch's thread pool does not work.
            context=multiprocessing.get_context("spawn"),
        )
        done: SimpleQueue[tuple[int, Future[Any]]] = SimpleQueue()
        failed: list[Exception] = []
        # In a thread of its own: KeyboardInterrupt in the main thread could leave a lock of the pool taken.
        arguments = (pool, function, list(left.items()), timeout, done, failed)
        starter = threading.Thread(target=_schedule, args=arguments, daemon=True)
        starter.start()
        try:
            starter.join()
            if failed:
                raise failed[0]
            while left and pool.active:
                with contextlib.suppress(Empty):
                    index, future = done.get(timeout=SECONDS_TO_LOOK)
                    outcome = _outcome(index, future, timeout)
                    del left[index]
                    yield outcome
        except BrokenProcessPool:
            pass
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
            starter.join()
            pool.join()
    for index in left:
        yield Outcome(index=index, failure="the worker processes died before they took a job")


def _schedule(
    pool: ProcessPool,
    function: Callable[[Any], Any],
    jobs: Sequence[tuple[int, Any]],
    timeout: float | None,
    done: SimpleQueue[tuple[int, Future[Any]]],
    failed: list[Exception],
) -> None:
    """Start the workers and give them all jobs, in a thread that does not get SIGINT.

    What keeps the pool from starting is put into `failed`; started a second time, it would never end.

    Threads and processes that start from it inherit this. A terminal sends Ctrl-C to the workers too; one that is
    still importing would print a traceback. Only the parent is to answer.
    """
    try:
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # would unblock the signal if it started later (CPython 3.11)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        _ = pool.active  # starts it
    except Exception as error:
        failed.append(error)
        return
    with contextlib.suppress(RuntimeError):  # the pool is broken, or was stopped meanwhile
        for index, job in jobs:
            future = pool.schedule(_answer, (function, job), timeout=timeout)
            future.add_done_callback(partial(_put, done, index))


def _put(done: SimpleQueue[tuple[int, Future[Any]]], index: int, future: Future[Any]) -> None:
    done.put((index, future))


def _outcome(index: int, future: Future[Any], timeout: float | None) -> Outcome:
    try:
        value, failure = future.result()
    except TimeoutError:
        value, failure = None, f"took longer than {timeout:g} s"
    except ProcessExpired as error:
        value, failure = None, _cause_of_death(error.exitcode)
    return Outcome(index=index, value=value, failure=failure)


def _start_worker(set_up: Callable[[], None] | None, most_memory: int) -> None:
    """In the worker, before its first job."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends at once, also inside a long call into C
    if hasattr(os, "fork"):
        _start_guard(most_memory)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if set_up is not None:
        set_up()


def _start_guard(most_memory: int) -> None:
    """Let no process that a job starts outlive its worker, and no worker take all memory.

    The guard kills the worker's process group when the worker is gone or too large. It is a process, since a thread
    of the worker waits while a job is inside C.
    """
    os.setpgid(0, 0)
    worker = os.getpid()
    if os.fork() == 0:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        while os.getppid() == worker and _resident_bytes(worker) <= most_memory:
            time.sleep(SECONDS_TO_WEIGH)
        os.killpg(worker, signal.SIGKILL)


def _resident_bytes(process: int) -> int:
    """Memory of a process; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and a job may never end by itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(function: Callable[[Any], Any], job: Any) -> tuple[Any, str | None]:
    """In the worker: the function's value, or one line that says why it failed."""
    try:
        value = function(job)
        pickle.dumps(value)  # what cannot be sent fails here, and not in the pool
        return value, None
    except BaseException as error:  # SystemExit too: the job has failed, its worker has not
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({printable(Path(frames[-1].filename).name)}:{frames[-1].lineno})" if frames else ""
        return None, f"{printable(type(error).__name__)}: {one_line(error)[:300]}{place}"


def _cause_of_death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended by itself, with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    full = f" (out of memory, or more than {MOST_MEMORY >> 30} GiB?)"
    return f"its process was killed by {name}" + full * (name == "SIGKILL")
