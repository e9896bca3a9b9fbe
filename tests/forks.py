"""Work in a forked process, which has all imports done and may ruin itself."""

import os
import pickle
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forked(work: Callable[[], Any]) -> Any:
    """What the work returns in a process of its own; an AssertionError with the traceback of whatever it raises."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            result = pickle.dumps((work(), None))
        except BaseException:
            result = pickle.dumps((None, traceback.format_exc()))
        with open(writer, "wb", closefd=False) as stream:
            stream.write(result)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    value, problem = pickle.loads(data) if data else (None, "the forked process died")
    if problem is not None:
        raise AssertionError(problem)
    return value


def little_memory(kilobytes: int) -> None:
    """Let this process have more memory than it has now, by so much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (kilobytes << 10)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
