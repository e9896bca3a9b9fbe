"""Every mistake in the input of `dcls-convert` ends in one line and the documented exit code, and
writes nothing.

A row of the tables is one kind of mistake: the input, and what the line must say about it.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from torch import nn

from dcls_convert.text import shortened

from ..command_line import NET, run
from ..conftest import TINY  # 9 depthwise 7x7 convolutions, first stages.0.blocks.0.conv_dw

MISTAKE = 2
NOTHING_MATCHES = 3
SMALL = ("--input-size", "3x32x32")  # for speed
# If an option is repeated, its last value counts.
SIZED = (NET, *SMALL, "--dilated-size", "17")
OWN = f"{__name__}:build"


def build():
    """A network of the user's own that converts in no time."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64))
    )


def table(rows):
    """Parametrize a test by rows of `user_input: says`, or of `id: (user_input, *says)`."""
    rows = {kind: row if isinstance(row, tuple) else (kind, row) for kind, row in rows.items()}
    return pytest.mark.parametrize(
        ("user_input", "says"),
        [pytest.param(user_input, says, id=kind) for kind, (user_input, *says) in rows.items()],
    )


def snapshot(folder="."):
    """Return everything in the folder, including hidden files: modes, and contents or link
    targets.
    """

    def content(path):
        if path.is_symlink():
            return path.readlink()
        return path.is_file() and path.read_bytes()

    return {path: (path.lstat().st_mode, content(path)) for path in Path(folder).rglob("*")}


def check_line(out, err, says):
    """Check that the last line of stderr is the only error; with --json, stdout has it as well.

    Return that line. It must contain all of `says` (texts or patterns).
    """
    assert "Traceback" not in err
    lines = err.splitlines()
    if out:  # with --json
        error = json.loads(out)
        assert lines[-1:] == [f"error: {error['error']}"]
        assert error["exit_code"] != 0
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], (
        f"not one line of error: {err!r}"
    )
    for part in says:
        assert re.search(part if isinstance(part, re.Pattern) else re.escape(part), lines[-1]), (
            f"{part!r}: {err}"
        )
    return lines[-1]


def refused(*arguments, says, code=MISTAKE):
    """Check that `dcls-convert` refuses and changes no file; return the line of the error."""
    before = snapshot()
    out, err = run(*arguments, code=code)
    assert snapshot() == before, err
    return check_line(out, err, says)


# --- The command line itself


@table(
    {
        f"{NET} --plan nowhere": "nowhere: is not a folder",
        "rules nope": "No such command 'nope'",
        f"{NET} --size 9": "No such option: --size (Possible options: --dilated-size).",
        f"sweep {NET} --size 9": "No such option: --size (Possible options: --sizes).",
        f"sweep {NET} --dilated-size 9 13": "(Possible options: --sizes 9,13)",
        f"sweep {NET} --sizes 9 13": (
            "(13); a list is written with commas: dcls-convert sweep MODEL --sizes 9,13."
        ),
        f"{NET} --mean 0.5 0.4 0.3": "(0.4 0.3); a list is written with commas",
        f"{NET} {NET}": re.compile(r"extra argument.*\)\. Try"),
        "fold .": ".: is not a checkpoint; it has neither config.json nor model.safetensors",
    }
)
def test_a_wrong_usage_is_refused_and_nothing_written(user_input, says):
    refused(*user_input.split(), says=says)


@pytest.mark.parametrize("user_input", [[], ["rules"]], ids=["dcls-convert", "dcls-convert rules"])
def test_nothing_at_all_shows_the_help(user_input):
    out, err = run(*user_input)
    assert err == ""
    assert "Usage: " in out


# --- MODEL


@table(
    {
        "newline": (
            "convnext_atto\n",
            r"no model 'convnext_atto\n'",
            "did you mean 'convnext_atto'",
        ),
        "empty": ("", "model '' has no name"),
        "unknown tag": ("resnet18.nope", "timm:resnet18.nope: cannot be built", "nope"),
        "unknown in torchvision": (
            "torchvision:resnet81",
            "'torchvision:resnet81' (did you mean 'resnet18'",
        ),
        "a file": (
            "my/weights.pth",
            "is a weights file; name its model, and add --checkpoint ",
        ),
        "of the hub": ("facebook/convnext", "a model on the hub is hf-hub:facebook/convnext"),
        "a module's file": ("my/module.py:build", "name the module, not its file: my.module:build"),
        "our entry": ("dcls_convert", re.compile("no model 'dcls_convert'|not a model by itself")),
        "no attribute": ("os:nothing", "module 'os' has no function 'nothing'"),
        "hub, not cached": (
            "hf-hub:timm/nope-nope",
            "hf-hub:timm/nope-nope",
            "not in the local cache",
        ),
    }
)
def test_a_wrong_model_name_is_refused_and_nothing_written(user_input, says):
    refused(user_input, "--dry-run", says=says)


CONV = """from torch import nn
def conv(size, **k):
    convs = nn.Conv2d(3, 8, 1, **k), nn.Conv2d(8, 8, size, padding=size // 2, **k)
    return nn.Sequential(nn.Sequential(*convs))
"""  # the first takes the image, which makes it the stem


@table(
    {
        "syntax error": ("def build(:", "mymodel:build", "SyntaxError", "mymodel.py, line 1"),
        "fails on import": ("1 / 0", "ZeroDivisionError: division by zero"),
        "needs a file": (
            "def build(): open('weights.pth')",
            "mymodel:build: cannot be built: FileNotFoundError",
        ),
        "several lines": (
            "def build(): raise ValueError('first\\nsecond')",
            "ValueError: first second",
        ),
        "leaves the program": (
            "import sys\ndef build(): sys.exit(7)",
            "mymodel:build",
            "SystemExit",
        ),
        "gives a class": (
            f"{CONV}def build(): return nn.Linear",
            "returns a type, not a torch.nn.Module",
        ),
        "gives no weights": (
            f"{CONV}def build(): return conv(3, device='meta')",
            "mymodel:build",
            "meta",
        ),
    }
)
def test_models_of_the_users_own(user_input, says):
    Path("mymodel.py").write_text(user_input)
    refused("mymodel:build", says=says)


@table(
    {
        "--num-classes 3": "unexpected keyword argument 'num_classes'",
        "--in-chans 3": "unexpected keyword argument 'in_chans'",
        "--pretrained": "pretrained weights are for models of timm and torchvision",
        "--input-size 4x9x9": re.compile("input size 4x9x9, .*hannel"),
    }
)
def test_options_that_the_users_model_does_not_take(user_input, says):
    refused(OWN, *user_input.split(), says=says)


@table(
    {
        "no config": (None, "local-dir:folder: cannot be built: FileNotFoundError"),
        "no architecture": (
            "{}",
            "local-dir:folder: its config.json names no architecture; it is not a config of timm",
        ),
        "our architecture": (
            '{"architecture": "dcls_convert"}',
            '"dcls_convert" is not a model by itself',
        ),
        "no weights": (
            '{"architecture": "test_convnext"}',
            "pretrained weights cannot be loaded",
            "folder",
        ),
    }
)
def test_local_folders(user_input, says):
    Path("folder").mkdir()
    if user_input is not None:
        Path("folder/config.json").write_text(user_input)
    refused("local-dir:folder", "--pretrained", says=says)


def test_a_converted_model_is_not_converted_again():
    run(TINY, *SMALL, "--output", "done")
    refused("local-dir:done", says=["the model is converted already: it has 9 DCLS layers"])


# --- Options: wrong values, and values that do not fit this model


NO_SIZE = (
    "is not a size: give an integer from 1 to 9999 such as 17, sides such as 17x9, "
    "or a growth such as +4"
)
NO_INPUT = "is not an input size: give channels and sides from 1 to 9999, such as 3x224x224"
NO_COUNT = "is not an integer from 1 to 1000000000, or auto"
NO_NUMBERS = ["", "1_0", " 17 ", "\uff11\uff17", "-1", "1e3", "nan", "9" * 5000]


@pytest.mark.parametrize(
    ("option", "values", "allowed"),
    [
        ("--dilated-size", ["17x", "17x0", "17.0", "17x17x17x17", "10000", "+0"], NO_SIZE),
        ("--input-size", ["3", "0x9x9", "3x1x1x1x1", "3,9,9", "3x10000x9"], NO_INPUT),
        ("--kernel-count", ["0", "AUTO", "1000000001"], NO_COUNT),
    ],
)
def test_what_is_no_value_of_an_option_is_refused_with_what_is(option, values, allowed):
    for value in [*NO_NUMBERS, *values]:
        refused(
            NET,
            option,
            value,
            says=[f"Invalid value for '{option}': '{shortened(value)}' {allowed}"],
        )


@table(
    {
        **{f"--budget {value}": f"budget '{value}' must be a percentage" for value in ("0", "nan")},
        "--seed a": "Invalid value for '--seed': Input should be a valid integer",
        "--in-chans 0": "Invalid value for '--in-chans': Input should be greater than or equal to",
        "--scope nope": "Invalid value for '--scope': 'nope' is not one of 'auto', 'model'",
        "--model-kwargs size": "--model-kwargs: 'size' is not KEY=VALUE",
        "--model-kwargs size=7 size=9": "--model-kwargs: size is stated twice",
        "--model-kwargs size={7}": "a value is a number, a text, True, False, None, or a list",
        "--model-kwargs num_classes=7 --num-classes 7": "num_classes is stated twice",
        "--model-kwargs nope=7": "unexpected keyword argument 'nope'",
        "--dilated-size 17x17x17": (
            "stages.0.1: the size 17x17x17 is for 3-D, this convolution is 2-D"
        ),
        "--input-size 4x64x64": re.compile("input size 4x64x64, .*hannel"),
        "--input-size 3x1x1": (
            "input size 3x1x1, as (channels, *spatial): the model does not run at 3x1x1: "
        ),
        "--checkpoint gone.pth": "checkpoint gone.pth: there is no such file",
        "--checkpoint /": "checkpoint /: this folder has no file of weights",
        # options in conflict
        "--plan . --budget 90": "a plan is applied unchanged; omit the planning options",
        "-q -v": "--quiet and --verbose exclude each other",
        **{
            f"--max-macs +10% {more}": re.compile(
                r"\+\d+\.\d+ % MACs; --max-macs allows \+10 %; .* dcls-convert sweep \S+net"
            )
            for more in ("", "--dry-run")
        },
        "--max-macs -5": "'-5' is not a percentage such as +50%",
        "--init exact --interpolation gaussian": (
            "gaussian interpolation spreads an element over several cells"
        ),
        "--scope error --pretrained --dry-run": (
            "scope 'error' reads kernels and images, which a dry run does not"
        ),
    }
)
def test_a_wrong_option_is_refused_and_nothing_written(user_input, says):
    refused(*SIZED, *shlex.split(user_input), says=says)


@table(
    {
        "--dilated-size 16": re.compile(r"use (\d+) or (\d+)"),
        "--dilated-size 5": re.compile(r"use (\d+) or more"),
        "--kernel-count 290": re.compile(
            r"count 290 is more than the 289 cells of its window; use (\d+) or fewer"
        ),
    }
)
def test_what_a_message_advises_works(user_input, says):
    option, _ = user_input.split()
    for value in says[0].search(refused(*SIZED, *user_input.split(), says=says)).groups():
        run(*SIZED, "--dry-run", option, value)


# --- Exit code 3


def test_a_model_in_which_nothing_matches():
    says = [re.compile("it has 4 depthwise 7x7, .*; rules 'depthwise' would match 4")]
    refused(NET, "--rules", "dense3x3", says=says, code=NOTHING_MATCHES)
    refused("rules", "check", "dense3x3", "--model", NET, says=says, code=NOTHING_MATCHES)


def test_a_model_without_a_convolution_that_could_match():
    Path("mymodel.py").write_text(
        "from torch import nn\ndef build(): return nn.ConvTranspose2d(3, 8, 3)"
    )
    says = ["it has 1 ConvTranspose2d (transposed convolution)"]
    refused("mymodel:build", says=says, code=NOTHING_MATCHES)


# --- Files: few rows, since tests of weights, rules and outputs have all mistakes


@table(
    {
        "--output foreign --force": re.compile(
            "output foreign holds 'data.txt'.* it is left as it is"
        ),
        "--output ''": "output .: name a new folder, not one that is there already",
        "--output half.safetensors/x": "half.safetensors is not a folder",
    }
)
def test_a_wrong_output_is_refused_and_nothing_written(user_input, says):
    Path("half.safetensors").write_bytes(b"{")
    Path("foreign").mkdir()
    Path("foreign/data.txt").write_text("the user's own")
    refused(OWN, *shlex.split(user_input), says=says)
