"""What reaches the terminal: no control character from data, one line for each mistake, and nothing
that is not true.

If stdout cannot take the report, the checkpoint is still written, and the exit code says that the
report was not printed.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from torch import nn

from dcls_convert.checkpoints.load import load_converted

from ..command_line import exit_code, run

OWN = f"{__name__}:build"
PLAIN = f"{__name__}:plain"
# An escape that sets the terminal's title, a bell, a right-to-left override, a lone surrogate.
EVIL = "\x1b]0;owned\x07\u202e\ud800"
EVIL_RULES = r"""
format: 1
description: "\e]0;owned\a"
rules:
- {name: "\e[31m\a", match: {kernel_size: 5}, skip: "\e[2J because\nof this"}
- {name: "\x9b2J", match: {kind: dense}, dilated_size: 7}
"""


def build():
    """A network with an evil name that converts in no time."""
    stage = nn.Sequential()
    for name, size in (("0", 3), (EVIL, 3), ("last", 5)):
        stage.add_module(name, nn.Conv2d(8, 8, size, padding=size // 2))
    return nn.Sequential(nn.Conv2d(3, 8, 3), stage)


def plain():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [OWN, "--dry-run", "--verbose"],
        [OWN, "--dry-run", "--json"],
        [OWN, "--dry-run", "--rules", "evil.yaml", "--verbose"],
        ["rules", "check", EVIL],
        ["rules", "check", "\x1b]0;owned\x07.yaml"],
        ["rules", "show", "evil.yaml"],
        ["models", EVIL],
        [OWN, "--output", EVIL, "--quiet"],
        [OWN, f"--{EVIL}", "9"],
    ],
)
def test_no_control_character_of_data_reaches_the_terminal(capsys, arguments):
    for name in ("evil.yaml", "\x1b]0;owned\x07.yaml"):
        Path(name).write_text(EVIL_RULES)
    assert exit_code(*arguments) in (0, 2)
    for text in capsys.readouterr():
        assert {character for character in text if not character.isprintable()} <= {"\n"}, text


def talkative():
    print("Downloading")
    return plain()


def test_what_libraries_print_is_not_in_the_results():
    out, err = run(f"{__name__}:talkative", "--json", "--output", "out")
    assert isinstance(json.loads(out), dict)
    assert "Downloading" in err


def test_a_stdout_of_any_encoding_gets_the_report(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert exit_code(PLAIN, "--output", "out") == 0
    text = written.getvalue().decode("ascii")
    assert "3x3 ? 5x5" in text  # an arrow
    assert "Wrote out, from random initialisation" in text


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize(
    ("stdout", "code", "says"),
    [
        (lambda: open("/dev/full", "w"), 2, ["error: No space left on device"]),
        (closed_pipe, 1, []),
    ],
    ids=["full", "pipe"],
)
def test_a_stdout_that_takes_nothing_does_not_take_back_the_checkpoint(
    capsys, monkeypatch, stdout, code, says
):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout())
        assert exit_code(PLAIN, "--output", "out") == code
        with contextlib.suppress(OSError):
            sys.stdout.close()
    load_converted("out", model=plain())
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == says


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([PLAIN, "--scope", "nope"], "usage"),
        (["nomodel"], "model"),
        ([PLAIN, "--rules", "depthwise"], "nothing_matches"),
        ([PLAIN, "--dilated-size", "4"], "plan"),
        (["verify", "nowhere"], "checkpoint"),
    ],
)
def test_an_error_is_an_object_with_a_kind_where_json_is_asked_for(arguments, kind):
    code = 3 if kind == "nothing_matches" else 2
    out, err = run(*arguments, "--json", code=code)
    line = err.splitlines()[-1].removeprefix("error: ")
    assert json.loads(out) == {"error": line, "kind": kind, "exit_code": code}


def test_a_bug_is_one_line_with_exit_code_1_and_a_traceback_on_demand(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr("dcls_convert.conversion.convert.finish_", broken)
    last = run(PLAIN, code=1)[1].splitlines()[-1]
    assert last.startswith("error: this is a bug in dcls-convert: ZeroDivisionError: oh no")
    monkeypatch.setenv("DCLS_CONVERT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        exit_code(PLAIN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_one_line_and_leaves_nothing(monkeypatch, number):
    monkeypatch.setattr(f"{__name__}.plain", lambda: signal.raise_signal(number))
    out, err = run(PLAIN, "--json", "--output", "out", code=130)
    assert err.splitlines()[-1] == "error: interrupted"
    assert json.loads(out)["kind"] == "interrupted"
    assert list(Path().iterdir()) == []
