"""Work in a forked process, which has all imports done and may ruin itself."""

import os
import pickle
import traceback
from collections.abc import Callable
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
