"""Progress is reported layer by layer, and shown after a while where somebody may be looking."""

import io
import re
import sys
import time

import pytest

from dcls_convert import convert_
from dcls_convert.progress import show_progress

from .command_line import net


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def _xterm(monkeypatch):
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("progress", [None, True])
def test_python_is_silent_in_a_pipe_unless_asked(capfd, monkeypatch, progress):
    monkeypatch.setattr("dcls_convert.progress.SECONDS_UNSEEN", 0)
    monkeypatch.setattr("dcls_convert.progress.SECONDS_BETWEEN_LINES", 0)
    convert_(net(), dilated_size=9, input_size=(3, 32, 32), init="fit", progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    if progress:
        assert "Sequential: fitting stages.1, layers 3 to 4 of 4\n" in err
    else:
        assert err == ""


@pytest.mark.usefixtures("_xterm")
def test_a_terminal_gets_a_bar_that_vanishes(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress("net") as notify:
        notify("reading")
        time.sleep(0.15)
        notify("fitting, layer 3 of 4", 2, 4)
        time.sleep(0.15)
    # Without colours and cursor movements.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "net: reading" in text
    assert "net: fitting, layer 3 of 4" in text
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


@pytest.mark.usefixtures("_xterm")
def test_a_dumb_terminal_gets_lines(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with show_progress("\x1b]0;x\x07") as notify:
        for number in range(3):
            notify(f"layer {number}", number, 3)
        notify("writing")
    assert stream.getvalue() == "\\x1b]0;x\\x07: layer 0\n\\x1b]0;x\\x07: writing\n"
