"""Random command lines, run in this process, have the documented exit codes and one line of error,
and leave nothing behind.
"""

import importlib
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.cli.app import app
from dcls_convert.export.formats import EXPORT_FORMATS

from ..command_line import run_to_end

SMALL = ("--input-size", "3x32x32")
OWN = f"{__name__}:build"
FOLDERS = ["good", "empty", "nowhere", "file", "mine", "out", "out\x1b[31m", "out\nput"]
PATHS = st.sampled_from([*FOLDERS, "weights.pth", "rules.yaml", "picture.png"])
WORDS = st.sampled_from(
    ["7", "9", "9x9", "7..11", "auto", "depthwise", "conv3x3", "3x32x32", "60%,100%", "99.5", "-1"]
)
TEXTS = st.text(max_size=20).map(
    lambda text: text.replace("\0", "").replace("../", "./").replace(":", ";")
)
# Options that are slow, belong to typer, or run code.
NEVER = {
    "--pretrained",
    "--jobs",
    "--install-completion",
    "--show-completion",
    "--help",
    "--trust-code",
}
EXPORTERS = {name for name, row in EXPORT_FORMATS.items() if row.is_file}  # they compile code
REPLACEABLE = {"good", "out", "empty", "file", "weights.pth", "rules.yaml"}  # with --force
RIGHT = [
    (OWN, "--dilated-size", "9", *SMALL),
    (
        OWN,
        "--rules",
        "rules.yaml",
        *SMALL,
        "--quiet",
        "--checkpoint",
        "weights.pth",
        "--init",
        "random",
    ),
    (OWN, "--plan", "good", "--dry-run", "--json"),
    ("fold", "good", "--trust-code"),
    ("inspect", "good", "--trust-code"),
    ("sweep", OWN, "--sizes", "7,9", *SMALL),
    ("verify", "good"),
    ("rules", "check", "rules.yaml", "--model", OWN),
]


def build():
    """A network of the user's own that converts in no time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), *[nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2)]
    )


def commands():
    """Yield (words, command) of each command."""
    for name, command in typer.main.get_command(app).commands.items():
        subcommands = getattr(command, "commands", None)
        if subcommands:
            for word, subcommand in subcommands.items():
                yield (name, word), subcommand
        else:
            yield (name,), command


def values_of(parameter):
    """Return a strategy for values of a parameter, most of which it accepts."""
    if parameter.name == "model":
        return st.sampled_from([OWN, OWN, "nomodel", "timm:nope", "torchvision:"]) | TEXTS
    if parameter.name == "pattern":  # of `models`; some patterns take minutes
        return TEXTS.map(lambda text: f"nope{text}")
    annotation = parameter.type_descriptor.annotation
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    paths = Path in (annotation, *get_args(annotation))
    if choices:
        usual = st.sampled_from(choices)
    elif paths:
        usual = PATHS
    else:
        usual = WORDS
    return st.one_of(usual, TEXTS)


@st.composite
def any_command(draw):
    words, command = draw(st.sampled_from(list(commands())))
    line = [*words]
    options = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            line.append(draw(values_of(parameter)))
        elif parameter.param_type_name == "option" and parameter.opts[0] not in NEVER:
            options.append(parameter)
    if options:
        for option in draw(st.lists(st.sampled_from(options), max_size=6)):
            line.append(draw(st.sampled_from(option.opts)))
            if not option.is_flag and not option.count:
                line.append(draw(values_of(option)))
    return line


@st.composite
def nearly_right(draw):
    """A correct command line, except for its output, with up to two words changed, dropped or
    doubled.
    """
    line = [*draw(st.sampled_from(RIGHT)), *draw(st.sampled_from([["--force"], []]))]
    if line[0] not in ("verify", "rules", "sweep") and draw(st.booleans()):
        line += [{"inspect": "--picture"}.get(line[0], "--output"), draw(PATHS)]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        index = draw(st.integers(0, len(line) - 1))
        if line[index] != OWN:
            line[index : index + 1] = draw(
                st.sampled_from([[], [draw(PATHS | WORDS | TEXTS)], line[index:][:1] * 2])
            )
    return line


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with folders and files for command lines to name."""
    importlib.import_module("matplotlib.font_manager")  # now, so that its cache exists
    root = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert run_to_end(*RIGHT[0], "--output", "good")[0] == 0
    shutil.copytree(root / "good", root / "out")
    for folder in ("empty", "mine"):
        (root / folder).mkdir()
    for file in ("mine/notes.txt", "file"):
        (root / file).write_text("the user's own")
    (root / "rules.yaml").write_text(
        "format: 1\nrules: [{match: {kind: depthwise}, dilated_size: 7}]\n"
    )
    torch.save(build().state_dict(), root / "weights.pth")
    return root


def modification_times(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


@given(line=(any_command() | nearly_right()).filter(lambda line: not EXPORTERS & {*line}))
def test_every_command_line_ends_as_documented(original, monkeypatch, tmp_path, line):
    root = tmp_path / "here"
    if not root.is_dir() or modification_times(root) != modification_times(original):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
    monkeypatch.chdir(root)
    before = modification_times(root)
    code, out, err = run_to_end(*line)
    after = modification_times(root)
    assert code in (0, 2, 3), err
    assert "Traceback" not in out + err
    assert out.replace("\n", "").replace("\t", "").isprintable()
    errors = [text for text in err.splitlines() if text.startswith("error: ")]
    if code:
        assert errors == err.splitlines()[-1:]
        assert len(errors[0]) < 1000
        assert "cannot be written: " not in errors[0], "refused only after all the work"
    new = {path for path in after.keys() - before.keys() if len(path.parts) == 1}
    assert not new or (code == 0 and not any(path.name.endswith(".partial") for path in new))
    changed = {path.parts[0] for path, time in before.items() if after.get(path) != time}
    assert changed <= REPLACEABLE
    assert not changed or ("--force" in line and code == 0)
