"""What reaches the terminal: no control character from data, one line for each mistake, and nothing
that is not true.

If stdout cannot take the report, the checkpoint is still written, and the exit code says that the
report was not printed.
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from dcls_convert.checkpoints.load import load_converted
from dcls_convert.cli import console
from dcls_convert.cli.app import main

from ..command_line import exit_code, run

OWN = f"{__name__}:build"
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
    """A network that converts in no time."""
    convs = {
        "0": nn.Conv2d(8, 8, 3, padding=1),
        EVIL: nn.Conv2d(8, 8, 3, padding=1),
        "last": nn.Conv2d(8, 8, 5, padding=2),
    }
    stage = nn.Sequential()
    for name, conv in convs.items():
        stage.add_module(name, conv)
    return nn.Sequential(nn.Conv2d(3, 8, 3), stage)


def plain():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    )


PLAIN = f"{__name__}:plain"


# Text from outside.


OPTIONS = (
    f"--{EVIL}",
    "--scope",
    "--seed",
    "--dilated-size",
    "--output",
    "--checkpoint",
    "--rules",
)


@pytest.mark.parametrize(
    "arguments",
    [
        *[["convert", OWN, "--dry-run", option] for option in ("--verbose", "--json")],
        *[
            ["convert", OWN, "--dry-run", "--rules", "evil.yaml", *more]
            for more in ([], ["--verbose"])
        ],
        ["rules", "check", "evil.yaml", "--model", OWN],
        ["rules", "show", "evil.yaml"],
        *[["convert", f"timm:{EVIL}", "--dry-run"], ["models", EVIL], ["inspect", EVIL]],
        *[["convert", OWN, option, EVIL, "--quiet"] for option in OPTIONS],
    ],
)
def test_no_control_character_of_data_reaches_the_terminal(capsys, arguments):
    Path("evil.yaml").write_text(EVIL_RULES)
    assert exit_code(*arguments) in (0, 2)
    for text in capsys.readouterr():
        assert {character for character in text if not character.isprintable()} <= {"\n"}, text


# Text of libraries.


def test_what_torch_says_of_a_download_is_not_in_the_results(monkeypatch, tmp_path_factory):
    name = "shufflenet_v2_x0_5"

    def download(_, path, *__, **___):
        torch.save(torchvision.models.get_model(name).state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    out, err = run(
        f"torchvision:{name}",
        "--pretrained",
        "--json",
        "--output",
        "out",
        "--input-size",
        "3x32x32",
    )
    assert isinstance(json.loads(out), dict)
    assert "Downloading" in err


# What stdout can take.


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii"])
def test_a_stdout_of_any_encoding_gets_the_report(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert exit_code(PLAIN, "--output", "out") == 0
    text = written.getvalue().decode(encoding)
    assert "3x3 ? 5x5" in text  # an arrow
    assert "Wrote out, from random initialisation" in text


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize(
    ("stdout", "says"),
    [
        (lambda: open("/dev/full", "w"), "No space left on device"),
        (
            lambda: io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True),
            "No space left on device",
        ),
        (lambda: None, "stdout is closed"),
        (closed_pipe, None),
    ],
    ids=["full", "full, unbuffered", "closed", "pipe"],
)
@pytest.mark.parametrize("options", [[], ["--json"], ["--quiet"]], ids=" ".join)
def test_a_stdout_that_takes_nothing_does_not_take_back_the_checkpoint(
    capsys, monkeypatch, stdout, says, options
):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout())
        assert exit_code(PLAIN, "--output", "out", *options) == console.EXIT_UNPRINTED
        if sys.stdout is not None:
            sys.stdout.close()  # nothing may be left to write, as at the exit of Python
    load_converted("out", model=plain())
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == ([f"error: the results cannot be printed: {says}"] if says else [])


def test_a_name_that_is_not_utf8_comes_out_as_it_is(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert exit_code(PLAIN, "--output", "a\udcff\u2603", "--quiet") == 0
    assert written.getvalue() == b"a\xff\xe2\x98\x83\n"


# Errors as JSON.


def test_an_error_is_an_object_where_json_is_asked_for():
    out, err = run("verify", "nowhere", "--json", code=2)
    line = err.removeprefix("error: ").removesuffix("\n")
    assert json.loads(out) == {"error": line, "kind": "checkpoint", "exit_code": 2}
    run(PLAIN, "--output", "out", "--input-size", "3x32x32")
    weights = Path("out/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    out, err = run("verify", "out", "--json", "--trust-code", code=2)
    assert json.loads(out)["ok"] is False  # what was found is the one object
    assert "problems found" in err


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([PLAIN, "--scope", "nope"], "usage"),
        ([PLAIN, "--quiet", "--verbose"], "usage"),
        (["nomodel"], "model"),
        ([PLAIN, "--rules", "nope"], "rule"),
        ([PLAIN, "--rules", "depthwise"], "nothing_matches"),
        ([PLAIN, "--dilated-size", "4"], "plan"),
        ([PLAIN, "--checkpoint", "nowhere.pth"], "checkpoint"),
        ([PLAIN, "--output", "."], "checkpoint"),
        ([PLAIN, "--output", "folder"], "output_exists"),
    ],
)
def test_an_error_has_a_kind(arguments, kind):
    Path("folder").mkdir()
    code = 3 if kind == "nothing_matches" else 2
    assert json.loads(run(*arguments, "--json", code=code)[0])["kind"] == kind


# Bugs.


def broken(*_, **__):
    raise ZeroDivisionError("oh\nno")


def test_a_bug_is_one_line_and_exit_code_1(monkeypatch):
    monkeypatch.setattr("dcls_convert.conversion.convert.carry_out", broken)
    last = run(PLAIN, code=1)[1].splitlines()[-1]
    assert last.startswith("error: this is a bug in dcls-convert: ZeroDivisionError: oh no")


def test_a_traceback_is_shown_on_demand(monkeypatch):
    monkeypatch.setattr("dcls_convert.conversion.convert.carry_out", broken)
    monkeypatch.setenv("DCLS_CONVERT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main([PLAIN])


# The log.


@pytest.fixture
def _log_as_before():
    log = logging.getLogger("dcls_convert")
    handlers = list(log.handlers)
    yield
    log.setLevel(logging.NOTSET)
    log.handlers[:] = handlers


@pytest.mark.usefixtures("_log_as_before")
def test_the_log_names_each_decision_on_demand(monkeypatch):
    assert "debug: " not in run(PLAIN, "--dry-run")[1]
    monkeypatch.setenv("DCLS_CONVERT_LOG", "debug")
    out, err = run(PLAIN, "--dry-run", "--json")
    report = json.loads(out)
    assert "debug: start: random; scope of the counts: model" in err
    for layer in report["layers"]:
        assert f"debug: {layer['name']}: rule " in err
        assert f"; {layer['kernel_count']} elements, bilinear; " in err
    for skipped in report["skipped"]:
        assert f"debug: {skipped['name']}: not converted: " in err
    assert run(PLAIN, "--output", "exact", "--init", "exact")[1].count(
        "error of the kernel"
    ) == len(report["layers"])
    monkeypatch.setenv("DCLS_CONVERT_LOG", "loud")
    assert "DCLS_CONVERT_LOG='loud' must be debug" in run(PLAIN, code=2)[1]


# Signals.


def interrupted(error=None):
    """Build a model as a library that swallows the KeyboardInterrupt, or raises `error` instead."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    if error:
        raise error
    return plain()


def interrupted_with_another_error():
    return interrupted(RuntimeError("as C++ code raises"))


@pytest.mark.parametrize("factory", [interrupted, interrupted_with_another_error])
def test_no_library_takes_an_interrupt_away(factory):
    err = run(f"{__name__}:{factory.__name__}", "--quiet", "--output", "out", code=143)[1]
    assert err.splitlines() == ["error: interrupted"]
    assert not Path("out").exists()


def signalled():
    """Build a model, while signals arrive."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.raise_signal(number)
    return plain()


def test_signals_that_were_ignored_stay_ignored():
    # As nohup does, and a shell for background jobs.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    assert exit_code(f"{__name__}:signalled", "--output", "out", "--quiet") == 0
