"""This machine's name and processes, for files that record which process made them."""

import os
import re
import socket

HOST_LENGTH = 20  # characters of the host's name, in names of partial folders


def host_name() -> str:
    """Return the name of this machine, in characters that every file system allows."""
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:HOST_LENGTH]


def is_alive(pid: int) -> bool:
    """True if a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)  # sends no signal, only checks
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user
        return True
    return True
