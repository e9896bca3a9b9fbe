"""The program as its user runs it, in this process."""

import contextlib
import io
import signal
import sys

import pytest

from dcls_convert.cli.app import SIGNALS, main


def exit_code(*arguments: object) -> int:
    """Of `dcls-convert ARGUMENTS`, which prints where the test does."""
    hook = sys.unraisablehook
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
    finally:
        sys.unraisablehook = hook
        for number, handler in handlers.items():  # here, since folders that a session shares are made by commands, too
            signal.signal(number, handler)
    return stopped.value.code


def ended(*arguments: object) -> tuple[int | str | None, str, str]:
    """Exit code, stdout and stderr of `dcls-convert ARGUMENTS`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = exit_code(*arguments)
    return code, out.getvalue(), err.getvalue()


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of `dcls-convert ARGUMENTS`, which must end with this exit code."""
    found, out, err = ended(*arguments)
    assert found == code, out + err
    return out, err
