"""Every mistake in the input of `dcls-convert` ends in one line and the documented exit code.

A row of the tables is one kind of mistake: the input, and what the line must say about it.
"""

import re
import shlex
from pathlib import Path

import pytest

from ..command_line import NET, run
from ..conftest import TINY  # 9 depthwise 7x7 convolutions, first stages.0.blocks.0.conv_dw

SMALL = ("--input-size", "3x32x32")  # for speed
# If an option is repeated, its last value counts.
SIZED = (NET, *SMALL, "--dilated-size", "17")


def refused(*arguments, says, code=2):
    """Check that `dcls-convert` refuses in one line; return that line.

    It must match `says`, a text or a pattern.
    """
    out, err = run(*arguments, code=code)
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], err
    assert "Traceback" not in err
    assert out == ""
    pattern = says if isinstance(says, re.Pattern) else re.escape(says)
    assert re.search(pattern, lines[-1]), err
    return lines[-1]


def table(rows):
    return pytest.mark.parametrize(("user_input", "says"), rows.items(), ids=list(rows))


@table(
    {
        # The command line itself.
        "rules nope": "No such command 'nope'",
        f"{NET} --dilated-sise 9": re.compile(r"No such option: --dilated-sise .*--dilated-size"),
        f"sweep {NET} --sizes 23..7": "runs backwards; give 7..23",
        f"sweep {NET} --sizes 7 --counts 3 --budgets 50": "counts and budgets exclude each other",
        f"{NET} {NET}": re.compile(r"extra argument.*\)\. Try"),
        "fold .": ".: is not a folder of dcls-convert; it has neither config.json nor "
        "model.safetensors",
        # MODEL
        "timm:resnet18.nope": re.compile("timm:resnet18.nope: cannot be built.*nope"),
        "torchvision:resnet81": "'torchvision:resnet81' (did you mean 'resnet18'",
        "my/weights.pth": "is a weights file; name its model, and add --checkpoint ",
        "os:nothing": "module 'os' has no function 'nothing'",
        "hf-hub:timm/nope-nope --dry-run": re.compile(
            "hf-hub:timm/nope-nope.*not in the local cache"
        ),
        "hf-hub:a/b/c": "hf-hub:a/b/c: cannot be built: ",
        # Options that a model of the user's own does not take.
        f"{NET} --pretrained": "pretrained weights are for models of timm and torchvision",
        f"{NET} --input-size 4x9x9": re.compile("input size 4x9x9, .*hannel"),
    }
)
def test_a_wrong_command_line_is_refused(user_input, says):
    refused(*shlex.split(user_input), says=says)


@table(
    {
        "def build(:": re.compile("mymodel:build.*SyntaxError.*mymodel.py, line 1"),
        "import sys\ndef build(): sys.exit(7)": re.compile("mymodel:build.*SystemExit"),
        "from torch import nn\ndef build(): return nn.Linear": (
            "returns a type, not a torch.nn.Module"
        ),
    }
)
def test_a_factory_of_the_users_own_that_fails(user_input, says):
    Path("mymodel.py").write_text(user_input)
    refused("mymodel:build", says=says)


def test_a_folder_that_names_no_model_or_is_converted_already():
    Path("folder").mkdir()
    Path("folder/config.json").write_text("{}")
    says = "local-dir:folder: its config.json names no architecture"
    refused("local-dir:folder", "--pretrained", says=says)
    run(TINY, *SMALL, "--output", "done")
    refused("local-dir:done", says="converted already; for a larger window, state a dilated size")


@table(
    {
        "--dilated-size 17x": (
            "'17x' is not a size: give an integer from 1 to 9999 such as 17, sides such as 17x9, "
            "or a growth such as +4"
        ),
        "--input-size 3": (
            "'3' is not an input size: give channels and sides from 1 to 9999999, such as 3x224x224"
        ),
        "--kernel-count 0": "'0' is not an integer from 1 to 1000000000, or auto",
        "--budget 0": "budget '0' must be a percentage",
        "--seed a": "Invalid value for '--seed': Input should be a valid integer",
        "--scope nope": "Invalid value for '--scope': 'nope' is not one of 'auto', 'model'",
        "--model-kwargs size": "--model-kwargs: 'size' is not KEY=VALUE",
        "--input-size 3x1x1": (
            "input size 3x1x1, as (channels, *spatial): the model does not run at 3x1x1: "
        ),
        "--checkpoint gone.pth": "weights file gone.pth: there is no such file",
        "--calibrate gone": re.compile("'--calibrate'.*'gone' does not exist"),
        "--plan . --budget 90": "a plan is applied unchanged; omit the planning options",
        "--output foreign/data.txt": "output foreign/data.txt is a file, not a folder",
        "--device gpu": "give cpu, or cuda for a GPU",
        "--output foreign --force": re.compile(
            "output foreign holds 'data.txt'.* it is left as it is"
        ),
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
    refused(NET, "--rules", "conv3x3", says=says, code=3)
