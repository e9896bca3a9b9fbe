"""Random command lines, in this process: the documented exit codes, one line of error, and nothing left behind."""

import importlib
import json
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
from .texts import numbers, plain, texts

pytestmark = pytest.mark.campaign

OWN = f"{build.__module__}:build"
FOLDERS = ["good", "folded", "empty", "nowhere", "file", "mine", "out", "a" * 240, "é" * 120, "out\x1b[31m", "out\nput"]
PATHS = st.sampled_from([*FOLDERS, "weights.pth", "rules.yaml", "page.html", "picture.png"])
WORDS = st.sampled_from(["7", "9", "9x9", "7..11", "auto", "depthwise", "conv3x3", "3x32x32", "60%,100%", "99.5"])
NUMBERS = st.integers(-1, 40).map(str) | numbers.map(str)
# Slow, of typer, or meant to run code.
NEVER = {"--pretrained", "--jobs", "--time", "--install-completion", "--show-completion", "--help", "--trust-code"}
EXPORTERS = ("onnx", "pt2")  # compile code of their own
SLOW = NEVER - {"--help", "--trust-code"}  # what a file of defaults must not turn on is tried there
FILES_OF_DEFAULTS = ["dcls-convert.toml", "pyproject.toml"]
TOML = [
    "[" * 100_000,
    "x = " + "[" * 100_000,
    "x = " + "{a=" * 20_000,
    "a." * 100_000 + "b = 1",
    "a." * 999 + "b = 1",
    "\n".join(f"a{number}." + "b." * 900 + "c = 1" for number in range(50)),
    "0x" + "f" * 4_500,
    "9" * 4_400,
    "1e400",
    "nan",
    "-inf",
    "1979-05-27T07:32:00Z",
    "99:99:99",
    '"\\U00110000"',
    '"\\ud800"',
    "'''",
    '"""',
    "\n[convert]\n[convert]\n",
    "\n[[models]]\n",
    "\n[rules.check]\n",
    "\n'' = ''\n",
    "x = 1\nx = 1\n",
    "[tool]\n",
    "\r",
    "\0",
    "\x7f",
    "\ufeff",
    "#" + "x" * (1 << 20),
]

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


def typed(word):
    """What a shell can give, and names no place outside, where a user may write."""
    return word.replace("\0", "").replace("../", "./")


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
    return [typed(word) for word in line]


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
    return [typed(word) for word in line]


@st.composite
def files_of_defaults(draw):
    """Tables of options, mostly with values that they may take; then attacks in places, and some other bytes."""
    own, tables = [], {}
    for words, command in draw(st.lists(st.sampled_from(list(commands())), max_size=4)):
        options = [each for each in command.params if each.param_type_name == "option" and each.opts[0] not in SLOW]
        parameter = draw(st.sampled_from(options)) if options else None
        table = own if words == ("convert",) else tables.setdefault(".".join(words), [])
        if parameter is not None:
            fitting = st.sampled_from(["true", "false"]) if parameter.is_flag else values_of(parameter).map(quoted)
            value = draw(fitting)
            value = draw(st.sampled_from([value] * 9 + [draw(plain.map(json.dumps)), draw(st.sampled_from(TOML))]))
            table.append(f"{draw(st.sampled_from([parameter.opts[0][2:]] * 9 + [quoted(draw(texts))]))} = {value}")
    text = "\n".join([*own, *(line for name, lines in tables.items() for line in (f"[{name}]", *lines))])
    text = draw(st.sampled_from([text, text, "[tool.dcls-convert]\n" + text.replace("[", "[tool.dcls-convert.")]))
    lines = text.split("\n")
    for attack in draw(st.lists(st.sampled_from(TOML), max_size=2)):
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = draw(st.sampled_from([f"{attack}\n{lines[place]}", lines[place] + attack]))
    text = "\n".join(lines)
    data = bytearray(text.encode(draw(st.sampled_from(["utf-8"] * 9 + ["utf-8-sig", "utf-16"])), "surrogatepass"))
    for place in draw(st.lists(st.integers(0, 10**6), max_size=3)) if data else ():
        data[place % len(data)] = draw(st.integers(0, 255))
    return bytes(data)


def quoted(value):
    return json.dumps(str(value), ensure_ascii=False)


def seen(folder):
    found = {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}
    return {path: time for path, time in found.items() if path.name not in FILES_OF_DEFAULTS}


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


@pytest.fixture
def check(workplace):
    """Run a command line there, and hold it to what the program promises; then all is as it was before."""
    copy = shutil.copytree(workplace, workplace.with_name("copy"))
    before = seen(workplace)

    def checked(line):
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

    return checked


def test_command_lines(campaign, workplace, check):
    lines = (command_lines() | nearly_right()).filter(lambda line: not {*EXPORTERS} & {*line})
    campaign.run(lines, check, folder=workplace.parent)


def test_defaults(campaign, workplace, check):
    def with_defaults(given):
        line, name, data = given
        (workplace / name).write_bytes(data)
        try:
            return check(line)
        finally:
            (workplace / name).unlink(missing_ok=True)

    data = files_of_defaults().filter(lambda data: not any(name.encode() in data for name in EXPORTERS))
    files = st.tuples(nearly_right(), st.sampled_from(FILES_OF_DEFAULTS), data)
    campaign.run(files, with_defaults, folder=workplace.parent)
