"""What `test_kills` kills: `dcls-convert ARGUMENTS`, as the console script runs it, in a process with all imports done.

python -m tests.cli.killed_worker HOW ARGUMENTS... runs the command once, and then forks a process for every line that
it reads. The forked process prints its id and runs the command, with pauses around each renaming, syncing and removal.
When it has ended, its exit code is printed, or minus the number of the signal that ended it. HOW is "exchange", or
"steps", where two names cannot be exchanged.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from dcls_convert.checkpoints import output
from dcls_convert.cli.app import main

PAUSE = 0.02  # seconds, before and after


def paused(call: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(PAUSE)
        try:
            return call(*args, **options)
        finally:
            time.sleep(PAUSE)

    return slowly


def exit_code(arguments: list[str]) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for ids and exit codes
            main(arguments)
    except SystemExit as stopped:
        return stopped.code
    except BaseException:  # which the console script would print, too
        traceback.print_exc()
    return 99


def run(arguments: list[str]) -> None:
    """The command, from its first line to its exit code, in this process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the tests may have been started with SIGINT ignored
    print(os.getpid(), flush=True)
    code = exit_code(arguments)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()  # as the interpreter does at its end, the rest of which takes a second in a fork
    os._exit(code)


def serve(how: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    assert exit_code(arguments) == 0
    if how == "steps":
        output._rename = lambda *_: False
    for name in ("_rename", "_fsync", "_remove"):
        setattr(output, name, paused(getattr(output, name)))
    os.rename = paused(os.rename)
    print("ready", flush=True)
    for _ in sys.stdin:
        if not (pid := os.fork()):
            run(arguments)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
