"""Models of timm's registry that harm their process; a worker of the survey registers them by `set_up`."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import timm

from dcls_convert.compare.survey import set_up_worker

PIDS = "DCLS_CONVERT_TEST_PIDS"  # a file for the processes that models start
WORDS = b"many words of a model\n" * 500_000  # 11 MB


class Untellable(Exception):
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


class Endless(Exception):
    def __str__(self):
        while True:
            pass

    __repr__ = __str__


class Long(Exception):
    def __str__(self):
        return "no\x1b[31m\n" * 5_000_000

    __repr__ = __str__


def _raise(error):
    raise error


def _ignore_and_hang():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def _eat():
    kept = []
    while True:
        kept.append(b"x" * (64 << 20))


def _start_process(*, and_die=False):
    with open(os.environ[PIDS], "a") as file:
        file.write(f"{subprocess.Popen(['sleep', '600']).pid}\n")
    if and_die:
        os._exit(3)
    time.sleep(600)


def _shout():
    for number in (1, 2):
        os.write(number, WORDS)
    sys.stdout.write(WORDS.decode())
    sys.stderr.write(WORDS.decode())
    raise ValueError("hoarse")


HOSTILE = {
    "hang_in_c": lambda: ctypes.PyDLL(None).sleep(600),
    "hang_without_signals": _ignore_and_hang,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "eat_memory": _eat,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "exit_at_once": lambda: os._exit(4),
    "leave": lambda: sys.exit("bye\nbye"),
    "interrupt": lambda: _raise(KeyboardInterrupt),
    "base_exception": lambda: _raise(BaseException("all\x1b[2Jgone")),
    "start_and_hang": _start_process,
    "start_and_die": lambda: _start_process(and_die=True),
    "shout": _shout,
    "untellable": lambda: _raise(Untellable()),
    "endless": lambda: _raise(Endless()),
    "long": lambda: _raise(Long()),
    "no_module": lambda: 7,
    "recurse": lambda: HOSTILE["recurse"](),
}


def _register(name, work):
    def build(pretrained=False, **_):
        return work()

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    timm.models.register_model(build)


def set_up():
    set_up_worker()
    globals()["__all__"] = []  # where timm adds the names
    for name, work in HOSTILE.items():
        _register(f"hostile_{name}", work)
