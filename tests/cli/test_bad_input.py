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


def snapshot():
    """Return everything in the folder: modes, and contents of files."""
    return {
        path: (path.lstat().st_mode, path.is_file() and path.read_bytes())
        for path in Path().rglob("*")
    }


def refused(*arguments, says, code=MISTAKE):
    """Check that `dcls-convert` refuses in one line and changes no file; return that line.

    It must match `says`, a text or a pattern. With --json, stdout has it as well.
    """
    before = snapshot()
    out, err = run(*arguments, code=code)
    assert snapshot() == before, err
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], err
    assert "Traceback" not in err
    assert out == "" or json.loads(out)["error"] == lines[-1].removeprefix("error: ")
    pattern = says if isinstance(says, re.Pattern) else re.escape(says)
    assert re.search(pattern, lines[-1]), err
    return lines[-1]


def table(rows):
    return pytest.mark.parametrize(("user_input", "says"), rows.items(), ids=list(rows))


@table(
    {
        # The command line itself.
        "rules nope": "No such command 'nope'",
        f"{NET} --size 9": "No such option: --size (Possible options: --dilated-size).",
        f"sweep {NET} --dilated-size 9 13": "(Possible options: --sizes 9,13)",
        f"sweep {NET} --sizes 9 13": (
            "(13); a list is written with commas: dcls-convert sweep MODEL --sizes 9,13."
        ),
        f"{NET} --mean 0.5 0.4 0.3": "(0.4 0.3); a list is written with commas",
        f"{NET} {NET}": re.compile(r"extra argument.*\)\. Try"),
        "fold .": ".: is not a checkpoint; it has neither config.json nor model.safetensors",
        # MODEL
        "''": "model '' has no name",
        "'test_convnext\n'": re.compile(r"no model 'test_convnext\\n'.* mean 'test_convnext'"),
        "timm:resnet18.nope": re.compile("timm:resnet18.nope: cannot be built.*nope"),
        "torchvision:resnet81": "'torchvision:resnet81' (did you mean 'resnet18'",
        "my/weights.pth": "is a weights file; name its model, and add --checkpoint ",
        r"C:\\nets\\mine": "is a path; a folder in timm's format is local-dir:",
        "facebook/convnext": "a model on the hub is hf-hub:facebook/convnext",
        "my/module.py:build": "name the module, not its file: my.module:build",
        "dcls_convert": re.compile("no model 'dcls_convert'|not a model by itself"),
        "os:nothing": "module 'os' has no function 'nothing'",
        "hf-hub:timm/nope-nope --dry-run": re.compile(
            "hf-hub:timm/nope-nope.*not in the local cache"
        ),
        # Options that a model of the user's own does not take.
        f"{OWN} --num-classes 3": "unexpected keyword argument 'num_classes'",
        f"{OWN} --pretrained": "pretrained weights are for models of timm and torchvision",
        f"{OWN} --input-size 4x9x9": re.compile("input size 4x9x9, .*hannel"),
    }
)
def test_a_wrong_command_line_is_refused(user_input, says):
    refused(*shlex.split(user_input), says=says)


@pytest.mark.parametrize("user_input", [[], ["rules"]], ids=["dcls-convert", "dcls-convert rules"])
def test_nothing_at_all_shows_the_help(user_input):
    out, err = run(*user_input, code=2)
    assert err == ""
    assert "Usage: " in out


@table(
    {
        "def build(:": re.compile("mymodel:build.*SyntaxError.*mymodel.py, line 1"),
        "1 / 0": "ZeroDivisionError: division by zero",
        "import sys\ndef build(): sys.exit(7)": re.compile("mymodel:build.*SystemExit"),
        "from torch import nn\ndef build(): return nn.Linear": (
            "returns a type, not a torch.nn.Module"
        ),
    }
)
def test_a_factory_of_the_users_own_that_fails(user_input, says):
    Path("mymodel.py").write_text(user_input)
    refused("mymodel:build", says=says)
    refused("mymodel.build", says="a function of your own is mymodel:build")


@table(
    {
        "": "local-dir:folder: cannot be built: FileNotFoundError",
        "{}": "local-dir:folder: its config.json names no architecture",
        '{"architecture": "dcls_convert"}': '"dcls_convert" is not a model by itself',
        '{"architecture": "test_convnext"}': "pretrained weights cannot be loaded",
    }
)
def test_local_folders(user_input, says):
    Path("folder").mkdir()
    if user_input:
        Path("folder/config.json").write_text(user_input)
    refused("local-dir:folder", "--pretrained", says=says)


def test_a_converted_model_is_not_converted_again():
    run(TINY, *SMALL, "--output", "done")
    refused("local-dir:done", says="the model is converted already: it has 9 DCLS layers")


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
        says = f"Invalid value for '{option}': '{shortened(value)}' {allowed}"
        refused(NET, option, value, says=says)


@table(
    {
        "--budget 0": "budget '0' must be a percentage",
        "--seed a": "Invalid value for '--seed': Input should be a valid integer",
        "--scope nope": "Invalid value for '--scope': 'nope' is not one of 'auto', 'model'",
        "--model-kwargs size": "--model-kwargs: 'size' is not KEY=VALUE",
        "--model-kwargs size=7 size=9": "--model-kwargs: size is stated twice",
        "--model-kwargs size={7}": "a value is a number, a text, True, False, None, or a list",
        "--model-kwargs num_classes=7 --num-classes 7": "num_classes is stated twice",
        "--dilated-size 17x17x17": (
            "stages.0.1: the size 17x17x17 is for 3-D, this convolution is 2-D"
        ),
        "--input-size 3x1x1": (
            "input size 3x1x1, as (channels, *spatial): the model does not run at 3x1x1: "
        ),
        "--checkpoint gone.pth": "checkpoint gone.pth: there is no such file",
        "--checkpoint /": "checkpoint /: this folder has no file of weights",
        "--plan nowhere": "nowhere: is not a folder",
        "--plan . --budget 90": "a plan is applied unchanged; omit the planning options",
        "-q -v": "--quiet and --verbose exclude each other",
        "--max-macs +10%": re.compile(
            r"\+\d+\.\d+ % MACs; --max-macs allows \+10 %; .* dcls-convert sweep \S+net"
        ),
        "--max-macs -5": "'-5' is not a percentage such as +50%",
        "--output foreign --force": re.compile(
            "output foreign holds 'data.txt'.* it is left as it is"
        ),
        "--output ''": "output .: name a new folder, not one that is there already",
        "--output foreign/data.txt/x": "data.txt is not a folder",
    }
)
def test_a_wrong_option_is_refused(user_input, says):
    Path("foreign").mkdir()
    Path("foreign/data.txt").write_text("the user's own")
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
    for value in says.search(refused(*SIZED, *user_input.split(), says=says)).groups():
        run(*SIZED, "--dry-run", option, value)


def test_a_model_in_which_nothing_matches():
    says = re.compile("it has 4 depthwise 7x7, .*; rules 'depthwise' would match 4")
    refused(NET, "--rules", "conv3x3", says=says, code=NOTHING_MATCHES)
    refused("rules", "check", "conv3x3", "--model", NET, says=says, code=NOTHING_MATCHES)
    Path("mymodel.py").write_text(
        "from torch import nn\ndef build(): return nn.ConvTranspose2d(3, 8, 3)"
    )
    says = "it has 1 ConvTranspose2d (transposed convolution)"
    refused("mymodel:build", says=says, code=NOTHING_MATCHES)
