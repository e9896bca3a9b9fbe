"""Jobs in worker processes that may crash: what kills a worker fails its job alone, and a new worker takes over.

`concurrent.futures.ProcessPoolExecutor` gives up as a whole when one of its processes dies.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ..errors import one_line

FUTILE_STARTS = 3  # workers that die in a row before they take a job; after that, none ever will
_KILLED_HINT = {"SIGKILL": " (out of memory?)"}


class WorkerError(RuntimeError):
    """Workers cannot be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one job."""

    index: int  # of the job
    value: Any = None  # what the function returned
    failure: str | None = None  # one line that names the cause; None where the function returned


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    job: int | None = None  # its index; None while the process starts
    deadline: float | None = None  # of the job, by time.monotonic


def run_jobs(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    timeout: float | None = None,
    set_up: Callable[[], None] | None = None,
) -> Iterator[Outcome]:
    """Call `function` for every job in processes of their own; outcomes come as they are ready, one for every job.

    However it ends, by an exception such as KeyboardInterrupt or by closing the iterator too, no worker is left.

    Args:
        function: Importable from a module, as are `set_up` and what they take and give.
        jobs: What it is called with, one at a time.
        workers: How many processes at most.
        timeout: Seconds for one job, the start of its worker not included.
        set_up: Called once in every process, before its first job.

    Raises:
        WorkerError: Processes die before they take a job.
    """
    pool = _Pool(function, jobs, timeout, set_up)
    try:
        yield from pool.outcomes(min(workers, len(jobs)))
    finally:
        pool.end()


class _Pool:
    def __init__(
        self,
        function: Callable[[Any], Any],
        jobs: Sequence[Any],
        timeout: float | None,
        set_up: Callable[[], None] | None,
    ) -> None:
        self._task = (function, set_up)
        self._jobs = jobs
        self._timeout = timeout
        self._waiting = deque(range(len(jobs)))
        self._workers: list[_Worker] = []
        self._futile = 0
        # Neither copies of this process nor of its threads: a fork of torch's thread pool does not work.
        self._context = multiprocessing.get_context("spawn")

    def outcomes(self, workers: int) -> Iterator[Outcome]:
        for _ in range(workers):
            self._start()
        left = len(self._jobs)
        while left:
            for outcome in self._next_events():
                left -= 1
                yield outcome

    def end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in list(self._workers):
            self._drop(worker)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *self._task), daemon=True)
        with _signals_held_back():
            process.start()
            self._workers.append(_Worker(process, ours))
        theirs.close()  # or the end of the process would not be the end of the pipe

    def _next_events(self) -> Iterator[Outcome]:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        heard = wait([worker.connection for worker in self._workers], seconds)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.connection in heard:
                yield from self._hear(worker)
            elif worker.deadline is not None and now >= worker.deadline:
                yield self._replaced(worker, f"took longer than {self._timeout:g} s")

    def _hear(self, worker: _Worker) -> Iterator[Outcome]:
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, OSError):
            worker.process.join()
            cause = _cause(worker.process.exitcode)
            if worker.job is not None:
                yield self._replaced(worker, cause)
            else:
                self._restart(worker, cause)
            return
        if worker.job is not None:
            yield _read(message, worker.job)
        self._futile = 0
        self._give_job(worker)

    def _give_job(self, worker: _Worker) -> None:
        if not self._waiting:
            self._drop(worker)
            return
        worker.job = self._waiting.popleft()
        worker.deadline = None if self._timeout is None else time.monotonic() + self._timeout
        with contextlib.suppress(OSError):  # a worker that died in the meantime is heard of at its pipe's end
            worker.connection.send((worker.job, self._jobs[worker.job]))

    def _replaced(self, worker: _Worker, failure: str) -> Outcome:
        """The outcome of a job whose worker is lost; another takes its place while there are jobs."""
        assert worker.job is not None
        self._drop(worker)
        if self._waiting:
            self._start()
        return Outcome(index=worker.job, failure=failure)

    def _restart(self, worker: _Worker, cause: str) -> None:
        self._futile += 1
        if self._futile >= FUTILE_STARTS:
            raise WorkerError(f"{self._futile} worker processes in a row died while starting: {cause}")
        self._drop(worker)
        self._start()

    def _drop(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)


def _serve(connection: Connection, function: Callable[[Any], Any], set_up: Callable[[], None] | None) -> None:
    """The life of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.dup2(2, 1)  # whatever a job prints is no result
    if set_up is not None:
        set_up()
    with contextlib.suppress(EOFError, OSError):  # nobody is left to work for
        connection.send_bytes(b"ready")
        while True:
            index, job = connection.recv()
            connection.send_bytes(_answer(function, index, job))


def _end_with_parent() -> None:
    """A parent that was killed could not end its workers, and a job may never end by itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(function: Callable[[Any], Any], index: int, job: Any) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(Outcome(index=index, value=function(job))))
    except BaseException as error:  # SystemExit too: a job that wants to leave has failed, its worker has not
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        failure = f"{type(error).__name__}: {one_line(error)[:300]}{place}"
        return bytes(ForkingPickler.dumps(Outcome(index=index, failure=failure)))


def _read(message: bytes, index: int) -> Outcome:
    try:
        outcome = ForkingPickler.loads(message)
    except Exception as error:  # there are values that can be pickled, but not back
        return Outcome(index=index, failure=f"its result cannot be read: {type(error).__name__}: {one_line(error)}")
    assert isinstance(outcome, Outcome)
    return outcome


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        return f"its process was killed by {name}{_KILLED_HINT.get(name, '')}"
    return f"its process ended by itself, with exit code {exit_code}"


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Signals that end the program wait meanwhile, so that no process is started and then forgotten.

    What is started here never gets them, from its first instruction on: a terminal sends Ctrl-C to children as well,
    and they are to be ended by their parent, without a word of their own.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught: list[int] = []
    handlers: dict[int, Any] = {}
    mask: set[int | signal.Signals] | None = None
    try:
        # The mask is for the children. Here it does not suffice: another thread may take the signal, and Python then
        # calls the handler in this one.
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                handlers[number] = signal.signal(number, lambda number, _: caught.append(number))
        # It would be started with the first process, and in doing so lift the mask (CPython 3.11).
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for held, handler in handlers.items():
            signal.signal(held, signal.SIG_DFL if handler is None else handler)
        for arrived in caught:
            signal.raise_signal(arrived)
