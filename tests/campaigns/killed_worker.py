"""What `test_kills` kills: `dcls-convert ARGUMENTS`, as the console script runs it, in a process with all imports done.

python -m tests.campaigns.killed_worker runs the command lines of its first line, so that all is imported. Then it forks
a process for every job that it reads, and prints the process's id when its handlers of signals stand. A job may act on
itself: at a place, such as the return of a call, where Python would run the handler of a signal that came meanwhile.

A line `{"start": JOB}` starts a process, `{"wait": PID}` prints how it ended (or stopped), and `{"left": SECONDS}` ends
and prints what its processes left running after that time.
"""

import contextlib
import ctypes
import inspect
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import dcls_convert
from dcls_convert import output
from dcls_convert.cli import app

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl: orphans become this process's children
PACKAGE = Path(dcls_convert.__file__).parent
WATCHED = {*map(str, PACKAGE.rglob("*.py")), *(module.__file__ for module in (contextlib, shutil, threading))}
HOW = {"call": "begins", "return": "ends", "c_return": "after"}
SECONDS_TO_BEGIN = 0.2
ENDS = 99  # exit code of a command that raised what the console script would print


def exit_code(arguments: list[str]) -> int:
    try:
        app.main(arguments)
    except SystemExit as stopped:
        return stopped.code
    except BaseException:
        traceback.print_exc()
    return ENDS


def place_of(frame: Any, event: str, argument: Any) -> str | None:
    """Where the program is: "output._lock after open", "output._lock ends"; None outside the package."""
    code = frame.f_code
    if code.co_filename not in WATCHED or event not in HOW:  # most calls are of libraries, and this is to be fast
        return None
    if (
        event in ("call", "return") and code.co_flags & inspect.CO_GENERATOR
    ):  # perhaps to be closed, where no handler would run
        return None
    called = f" {argument.__name__}" if event == "c_return" else ""
    return f"{code.co_filename.rpartition('/')[2].removesuffix('.py')}.{code.co_qualname} {HOW[event]}{called}"


def act_at(place: str, turn: int, act: Callable[[], None]) -> None:
    """Let this thread act when it is at a place for the `turn`-th time."""
    seen = 0

    def watch(*where: Any) -> None:
        nonlocal seen
        if place_of(*where) == place:
            seen += 1
            if seen == turn:
                sys.setprofile(None)
                act()

    sys.setprofile(watch)


def record(places: Counter[str]) -> None:
    def watch(*where: Any) -> None:
        if place := place_of(*where):
            places[place] += 1

    sys.setprofile(watch)


def streams(job: dict[str, Any]) -> dict[str, int]:
    """Send stdout and stderr to files, or to a pipe where their reader will go away; the readers."""
    readers = {}
    for number, name in ((1, "stdout"), (2, "stderr")):
        if job["act"] == name:
            readers[name], writer = os.pipe()
        else:
            writer = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(writer, number)
        os.close(writer)
        setattr(sys, name, open(number, "w", buffering=-1 if number == 1 else 1, closefd=False))
    return readers


def run(job: dict[str, Any], told: int) -> None:
    """The command, from its first line to its exit code, in this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    readers, places = streams(job), Counter[str]()
    prepare = app._interrupt_once

    def act() -> None:
        if job["act"] in readers:
            os.close(readers[job["act"]])
            return
        number = getattr(signal, f"SIG{job['act']}")
        if job["again"]:
            threading.Timer(job["again"], os.kill, (os.getpid(), number)).start()
        os.kill(os.getpid(), number)

    def begin() -> list[int]:
        interrupts = prepare()
        os.write(told, f"{os.getpid()}\n".encode())
        if job["places"]:
            record(places)
        elif job["place"]:
            act_at(*job["place"], act)
        return interrupts

    app._interrupt_once = begin
    if job["steps"]:
        output._rename = lambda *_: False
    code = exit_code(job["arguments"])
    sys.setprofile(None)
    if job["places"]:
        Path(job["places"]).write_text(json.dumps(places))
    for thread in threading.enumerate():
        if thread.ident is None:
            time.sleep(SECONDS_TO_BEGIN)  # an interrupt inside Thread.start may leave one that never begins
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()  # as the interpreter does at its end, the rest of which takes a second in a fork
    os._exit(code)


def wait(pid: int) -> int | str:
    _, status = os.waitpid(pid, os.WUNTRACED)
    return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def left(seconds: float) -> list[str]:
    """Command lines of the processes that are still there after these seconds; they are ended."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    found = psutil.Process().children(recursive=True)
    for process in found:
        process.kill()
    return [repr(process) for process in found]


def serve() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    torch.set_num_threads(1)  # a fork has no other threads
    handlers = {number: signal.getsignal(number) for number in app.SIGNALS}
    told = os.dup(1)
    os.dup2(2, 1)  # stdout is for ids and exit codes
    for arguments in json.loads(sys.stdin.readline()):
        assert exit_code(arguments) == 0, arguments
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.write(told, b'"ready"\n')
    while line := sys.stdin.readline():
        [(what, argument)] = json.loads(line).items()
        if what == "start":
            if not os.fork():
                run(argument, told)
        else:
            answer = {"wait": wait, "left": left}[what](argument)
            os.write(told, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    serve()
