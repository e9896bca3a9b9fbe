"""Random command lines, in this process: the documented exit codes, one line of error, and nothing left behind."""

import importlib
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from hypothesis import strategies as st

from dcls_convert.cli.app import app

from ..command_line import ended
from .campaign import Finding, check_refusal
from .nets import build
from .texts import numbers, texts

pytestmark = pytest.mark.campaign

OWN = f"{build.__module__}:build"
FOLDERS = ["good", "folded", "empty", "nowhere", "file", "mine", "out", "a" * 240, "é" * 120, "out\x1b[31m", "out\nput"]
PATHS = st.sampled_from([*FOLDERS, "weights.pth", "rules.yaml", "page.html", "picture.png"])
WORDS = st.sampled_from(["7", "9", "9x9", "7..11", "auto", "depthwise", "conv3x3", "3x32x32", "60%,100%", "99.5"])
NUMBERS = st.integers(-1, 40).map(str) | numbers.map(str)
# Slow, of typer, or meant to run code.
NEVER = {"--pretrained", "--jobs", "--time", "--install-completion", "--show-completion", "--help", "--trust-code"}


REPLACEABLE = {"good", "out", "empty", "file", "weights.pth", "rules.yaml"}  # with --force; files by pages alone
SMALL = ("--input-size", "3x32x32")
RIGHT = [
    (OWN, "--dilated-size", "9", *SMALL),
    (OWN, "--dilated-size", "9", *SMALL, "--checkpoint", "weights.pth", "--init", "random"),
    (OWN, "--rules", "rules.yaml", *SMALL, "--quiet"),
    (OWN, "--plan", "good", "--dry-run", "--json"),
    ("fold", "good", "--trust-code"),
    ("inspect", "good", "--trust-code"),
    ("sweep", OWN, "--sizes", "7,9", *SMALL),
    ("verify", "good"),
    ("diff", "good", "out"),
    ("rules", "check", "rules.yaml", "--model", OWN),
]


def commands():
    """Every command of the program, by its words."""
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from [((name, word), each) for word, each in inner.items()] if inner else [((name,), command)]


def values_of(parameter):
    """Mostly ones that the parameter may take."""
    choices = get_args(parameter.type_descriptor.annotation)
    fitting = [choice for choice in choices if isinstance(choice, str)]
    if fitting:
        return st.sampled_from(fitting) | texts
    return st.one_of(
        *([PATHS] * 3 if Path in (parameter.type_descriptor.annotation, *choices) else [WORDS, NUMBERS]), texts
    )


no_module = texts.map(lambda text: text.replace(":", ";"))  # a name that is typed may be imported
MODELS = {
    "model": st.sampled_from([OWN] * 4 + ["nomodel", "timm:nope", "torchvision:"]) | no_module,
    "pattern": texts.map(lambda text: f"nope{text}"),  # of `models`; some patterns take minutes
}


@st.composite
def command_lines(draw):
    words, command = draw(st.sampled_from(list(commands())))
    line = list(words)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            line.append(draw(MODELS[parameter.name] if parameter.name in MODELS else values_of(parameter)))
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    for parameter in draw(st.lists(st.sampled_from(options), max_size=6)) if options else ():
        if parameter.opts[0] not in NEVER:
            line.append(draw(st.sampled_from(parameter.opts)))
            if not parameter.is_flag and not parameter.count:
                line.append(draw(values_of(parameter)))
    if draw(st.integers(0, 9)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(texts))
    return [word.replace("\0", "") for word in line]


@st.composite
def nearly_right(draw):
    """A command line that is right but for its output, with a word or two changed, dropped or doubled."""
    line = [*draw(st.sampled_from(RIGHT)), *draw(st.sampled_from([["--force"], []]))]
    option = {"sweep": "--picture", "inspect": "--html"}.get(line[0], "--output")
    line += [option, draw(PATHS)] if draw(st.booleans()) and line[0] not in ("verify", "diff", "rules") else []
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        place = draw(st.integers(0, len(line) - 1))
        if line[place] != OWN:
            line[place : place + 1] = draw(
                st.sampled_from([[], [draw(PATHS | WORDS | no_module)], line[place:][:1] * 2])
            )
    return [word.replace("\0", "") for word in line]


def seen(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The folder in which command lines run, with folders and files for them to name."""
    importlib.import_module("matplotlib.font_manager")  # now, so that its cache stands
    place = tmp_path / "workplace"
    place.mkdir()
    monkeypatch.chdir(place)
    assert ended(OWN, "--dilated-size", "9", "--input-size", "3x32x32", "--output", "good")[0] == 0
    shutil.copytree("good", "out")
    Path("empty").mkdir()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("the user's own")
    Path("file").write_text("the user's own")
    Path("rules.yaml").write_text("format: 1\nrules: [{match: {kind: depthwise}, dilated_kernel_size: 7}]\n")
    torch.save(build().state_dict(), "weights.pth")
    return place


def restore(workplace, copy):
    for path in workplace.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(copy, workplace, dirs_exist_ok=True)


def test_command_lines(campaign, workplace):
    copy = shutil.copytree(workplace, workplace.with_name("copy"))
    before = seen(workplace)

    def check(line):
        if {"onnx", "pt2"} & set(line):
            return None  # these exporters compile code of their own
        code, out, err = ended(*line)
        after = seen(workplace)
        if after != before:
            restore(workplace, copy)
        if code not in (0, 2, 3) or "Traceback" in out + err:
            raise Finding(f"ended with {code}: {err[-500:]}")
        errors = [text for text in err.splitlines() if text.startswith("error: ")]
        if code != 0:
            if errors != err.splitlines()[-1:]:
                raise Finding(f"not one line of error, the last: {err!r}")
            check_refusal(errors[0])
            if "cannot be written: " in errors[0] or "appeared meanwhile" in errors[0]:
                raise Finding(f"refused when all was done: {errors[0]!r}")
        if not out.replace("\n", "").replace("\t", "").isprintable():
            raise Finding(f"control characters among the results: {out[:500]!r}")
        left = {path for path in after.keys() - before.keys() if path.parent == workplace}
        if left and (code != 0 or any(path.name.endswith(".partial") for path in left)):
            raise Finding(f"left {left}")
        changed = {path.relative_to(workplace).parts[0] for path, time in before.items() if after.get(path) != time}
        if changed - REPLACEABLE or (changed and not ("--force" in line and code == 0)):
            raise Finding(f"changed {changed}, with exit code {code}")
        return code == 0

    campaign.run(command_lines() | nearly_right(), check, folder=workplace.parent)
