"""Whole command lines in forked processes, which have all imports done and may ruin their own process."""

import atexit
import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dcls_convert.cli.app import main

from .campaign import Finding


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int  # minus the number of the signal that ended it
    out: str
    err: str


def forked(work: Callable[[], Any]) -> Any:
    """What the work returns in a process of its own; a Finding with the traceback of whatever it raises."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.setpgid(0, 0)
        try:
            result = pickle.dumps((work(), None))
        except Finding as finding:
            result = pickle.dumps((None, str(finding)))
        except BaseException:
            result = pickle.dumps((None, traceback.format_exc()))
        with open(writer, "wb", closefd=False) as stream:
            stream.write(result)
        os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as stream:
            found = stream.read()
    finally:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    result, problem = pickle.loads(found) if found else (None, "the process of the campaign died")
    if problem is not None:
        raise Finding(problem)
    return result


def command(line: Sequence[str], harms: Iterable[Callable[[], None]] = ()) -> Ended:
    """`dcls-convert LINE`, in a process that the harms are done to right before."""
    pipes = [os.pipe(), os.pipe()]
    if not (pid := os.fork()):
        for descriptor, (_, writer) in zip((1, 2), pipes, strict=True):
            os.dup2(writer, descriptor)
        for pipe in pipes:
            for descriptor in pipe:
                os.close(descriptor)
        _run(line, harms)
    for _, writer in pipes:
        os.close(writer)
    out, err = _read([reader for reader, _ in pipes])
    return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out, err)


def _run(line: Sequence[str], harms: Iterable[Callable[[], None]]) -> None:
    code = 99
    try:
        faulthandler.disable()  # of pytest
        atexit._clear()  # what is registered so far belongs to the campaign's process
        tempfile.tempdir = None
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        for harm in harms:
            harm()
        main(list(line))
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:  # which the console script would print, too
        traceback.print_exc()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _read(readers: list[int]) -> list[str]:
    """All that comes out of the pipes."""
    found = dict.fromkeys(readers, b"")
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [found[reader].decode(errors="backslashreplace") for reader in readers]
