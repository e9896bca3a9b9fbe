"""Run the program in this process as its user would, and a network that converts in no time."""

import contextlib
import io
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from unittest.mock import patch

import pytest
from torch import nn

from dcls_convert.cli.app import main

NET = f"{__name__}:net"


def net(num_classes: int = 3, size: int = 7) -> nn.Module:
    """Two stages of two depthwise convolutions: stages.0.1, stages.0.2, stages.1.1, stages.1.2."""

    def pair() -> list[nn.Module]:
        return [nn.Conv2d(8, 8, size, padding=size // 2, groups=8) for _ in range(2)]

    stages = nn.Sequential(*[nn.Sequential(nn.AvgPool2d(2), *pair()) for _ in range(2)])
    head = {
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "head": nn.Linear(8, num_classes),
    }
    return nn.Sequential(OrderedDict({"stem": nn.Conv2d(3, 8, 1), "stages": stages, **head}))


def exit_code(*arguments: object) -> int:
    """Run `dcls-convert ARGUMENTS` with the stdout and stderr of the test; return its exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    command = ["dcls-convert", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as stopped, patch.object(sys, "argv", command):
            main()
    finally:
        # Restored here, not in a fixture of each test: session-wide fixtures run commands, too.
        signal.signal(signal.SIGTERM, handler)
    return stopped.value.code


def run_to_end(*arguments: object) -> tuple[int | str | None, str, str]:
    """Return exit code, stdout and stderr of `dcls-convert ARGUMENTS`."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = exit_code(*arguments)
    return code, out.getvalue(), err.getvalue()


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Return stdout and stderr of `dcls-convert ARGUMENTS`, which must end with this exit code."""
    actual_code, out, err = run_to_end(*arguments)
    assert actual_code == code, out + err
    return out, err


def imported_by(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run Python; return the finished process, and the names of all modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, set(re.findall(r"^import time:.*\|\s+(\S+)$", done.stderr, flags=re.MULTILINE))
