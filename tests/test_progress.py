"""Progress is reported layer by layer, and shown after a while where somebody may be looking."""

import io
import re
import sys
import time

import pytest
import torch

from dcls_convert import apply_plan_, convert_, find_convs, plan_conversion, progress
from dcls_convert.progress import is_stderr_watched, show_progress

from .command_line import net


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def become():  # in the test itself: between fixtures and test, pytest replaces stderr
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return become


@pytest.mark.parametrize(
    "images", [None, [torch.arange(6144.0).view(2, 3, 32, 32) % 7]], ids=["kernels", "calibrated"]
)
def test_a_fit_tells_of_every_layer_in_order(images):
    model = net()
    told = []
    plan = plan_conversion(find_convs(model, (3, 32, 32)), dilated_size=9)
    apply_plan_(model, plan, init="fit", calibration=images, notify=lambda *step: told.append(step))
    solving = "calibrating" if images else "fitting"
    steps = [step for step in told if step[0].startswith(solving)]
    covered = []
    for text, _, _ in steps:
        first, last = re.search(r", layers? (\d+)(?: to (\d+))? of 4$", text).groups()
        covered += range(int(first), int(last or first) + 1)
    assert covered == [1, 2, 3, 4]
    done = [step[1] for step in steps]
    (total,) = {step[2] for step in steps}
    assert sorted(set(done)) == done
    assert done[0] == 0
    assert done[-1] < total


@pytest.mark.parametrize("progress", [None, True])
def test_python_is_silent_in_a_pipe_unless_asked(capfd, monkeypatch, progress):
    monkeypatch.setattr("dcls_convert.progress.SECONDS_UNSEEN", 0)
    convert_(net(), dilated_size=9, input_size=(3, 32, 32), init="fit", progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    if progress:
        assert "Sequential: fitting stages.1, layers 3 to 4 of 4\n" in err
    else:
        assert err == ""


def test_somebody_may_be_looking_on_a_terminal_or_in_a_notebook(monkeypatch, terminal):
    terminal()
    assert is_stderr_watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_stderr_watched()
    monkeypatch.setitem(sys.modules, "ipykernel", progress)
    assert is_stderr_watched()


def test_a_terminal_gets_a_bar_that_vanishes(terminal):
    stream = terminal()
    with show_progress("quick", wait=30) as notify:
        notify("nothing to see")
    assert stream.getvalue() == ""
    with show_progress("net") as notify:
        notify("reading")
        time.sleep(0.15)
        for number in range(3):
            notify(f"fitting, layer {number + 1} of 4", number, 4)
            time.sleep(0.3)
    # Without colours and cursor movements.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "net: reading" in text
    assert "net: fitting, layer 3 of 4" in text
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_steps_are_shown_from_the_first_on_that_begins_when_the_wait_is_over(capsys):
    with show_progress("net", wait=0.1) as notify:
        notify("fast")
        time.sleep(0.2)
        notify("slow", 1, 3)
        notify("next", 2, 3)
    assert capsys.readouterr().err == "net: slow\nnet: next\n"


@pytest.mark.parametrize("variable", ["TERM=dumb", "FORCE_COLOR=1"])
def test_a_dumb_terminal_and_a_file_with_forced_colours_get_lines(terminal, monkeypatch, variable):
    stream = terminal()
    if variable == "FORCE_COLOR=1":
        stream.isatty = lambda: False
    monkeypatch.setenv(*variable.split("="))
    with show_progress("\x1b]0;x\x07", every=60) as notify:
        for number in range(3):
            notify(f"layer {number}", number, 3)
        notify("writing")
    assert stream.getvalue() == "\\x1b]0;x\\x07: layer 0\n\\x1b]0;x\\x07: writing\n"
