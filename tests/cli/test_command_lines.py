"""Random command lines, run in this process, have the documented exit codes and one line of error,
and leave nothing behind.
"""

import importlib
import shlex
import shutil
from typing import get_args

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.cli.app import app

from ..command_line import NET, net, run_to_end

FOLDERS = ["good", "empty", "nowhere", "file", "mine", "out", "out\x1b[31m", "out\nput"]
PATHS = st.sampled_from([*FOLDERS, "weights.pth", "rules.yaml", "picture.png"])
WORDS = st.sampled_from(
    ["7", "9", "9x9", "7..11", "auto", "depthwise", "conv3x3", "3x32x32", "60%,100%", "99.5", "-1"]
)
TEXTS = st.text(max_size=20).map(
    lambda text: text.replace("\0", "").replace("../", "./").replace(":", ";")
)
# Options that are slow, belong to typer, or run code.
NEVER = set(
    "--pretrained --jobs --install-completion --show-completion --help --trust-code".split()
)
EXPORTERS = {"onnx", "pt2"}  # they compile code
REPLACEABLE = {"good", "out", "empty", "file", "weights.pth", "rules.yaml"}  # with --force
RIGHT = [
    f"convert {NET} --dilated-size 9 --input-size 3x32x32 --output out",
    f"convert {NET} --rules rules.yaml --checkpoint weights.pth --init random --quiet",
    f"convert {NET} --plan good --dry-run --json",
    "fold good --trust-code --output out",
    "inspect good --picture picture.png",
    f"sweep {NET} --sizes 7,9 --input-size 3x32x32",
    f"verify good --model {NET}",
    "models nope",  # some patterns take minutes
    "rules list",
    "rules show depthwise",
    "rules check rules.yaml",
]


def options_of(line):
    """Return the options of a line's command."""
    command = typer.main.get_command(app).commands[line[0]]
    if line[0] == "rules":
        command = command.commands[line[1]]
    options = [option for option in command.params if option.param_type_name == "option"]
    return [option for option in options if option.opts[0] not in NEVER]


def values_of(option):
    """Return a strategy for values of an option, most of which it accepts."""
    annotation = option.type_descriptor.annotation
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    if choices:
        return st.sampled_from(choices) | TEXTS
    return PATHS | WORDS | TEXTS


@st.composite
def command_lines(draw):
    """A correct line with up to four more options, up to two words changed, dropped or doubled."""
    line = shlex.split(draw(st.sampled_from(RIGHT)))
    if options := options_of(line):
        for option in draw(st.lists(st.sampled_from(options), max_size=4)):
            line.append(draw(st.sampled_from(option.opts)))
            if not option.is_flag and not option.count:
                line.append(draw(values_of(option)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        index = draw(st.integers(0, len(line) - 1))
        if line[index] not in (NET, "nope"):
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
        assert run_to_end(*RIGHT[0].split())[0] == 0
    shutil.copytree(root / "out", root / "good")
    for folder in ("empty", "mine"):
        (root / folder).mkdir()
    for file in ("mine/notes.txt", "file"):
        (root / file).write_text("the user's own")
    (root / "rules.yaml").write_text(
        "format: 1\nrules: [{match: {kind: depthwise}, dilated_size: 7}]\n"
    )
    torch.save(net().state_dict(), root / "weights.pth")
    return root


def modification_times(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


@given(line=command_lines().filter(lambda line: not EXPORTERS & {*line}))
def test_every_command_line_ends_as_documented(original, monkeypatch, tmp_path, line):
    root = tmp_path / "here"
    if not root.is_dir() or modification_times(root) != modification_times(original):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
    monkeypatch.chdir(root)
    before = modification_times(root)
    code, out, err = run_to_end(*line)
    after = modification_times(root)
    assert code in (0, 2, 3, 4), err
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
