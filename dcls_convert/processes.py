"""Processes of this machine, and its name: for files that tell which process made them."""

import os
import re
import socket

HOST_LENGTH = 20  # characters of the host's name in the names of partial folders


def host_name() -> str:
    """The name of this machine, of characters that every file system takes."""
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:HOST_LENGTH]


def is_alive(pid: int) -> bool:
    """Whether there is a process with this id on this machine."""
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
