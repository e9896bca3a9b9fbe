"""Defaults of options from the nearest file: what is given wins, and what is wrong there is one line."""

import json
from pathlib import Path

import pytest

from dcls_convert.cli.defaults import MOST_BYTES

from ..command_line import run
from ..conftest import TINY

RULES = "format: 1\nrules:\n- {match: {kind: depthwise}, dilated_kernel_size: 11}\n"


def plan(*arguments, command=TINY):
    out, err = run(command, *arguments, "--dry-run", "--json")
    notes = [line for line in err.splitlines() if line.startswith("note: defaults")]
    return json.loads(out)["layers"][0], notes


def write(text, path="pyproject.toml"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_table_gives_defaults_and_what_is_given_wins():
    write('[tool.dcls-convert]\ndilated-size = "9x11"\ntie = "none"\n')
    layer, notes = plan()
    assert (layer["dilated_size"], layer["tie_group"]) == ([9, 11], None)
    assert notes == ["note: defaults of pyproject.toml: dilated-size=9x11, tie=none"]
    layer, notes = plan("--dilated-size", 13)
    assert layer["dilated_size"] == [13, 13]
    assert notes == ["note: defaults of pyproject.toml: tie=none"]
    assert plan("--dilated-size", 13, "--tie", "stage")[1] == []
    assert run(TINY, "--quiet", "--output", "out") == ("out\n", "")


def test_the_nearest_file_wins_and_paths_are_relative_to_it(monkeypatch):
    write("[project]\nname = 'dcls-convert'\n")  # has no table
    write("kernel-count = 5\n", "dcls-convert.toml")
    write(RULES, "a/my.yaml")
    write("[tool.dcls-convert]\nrules = 'my.yaml'\n", "a/pyproject.toml")
    Path("a/b").mkdir()
    monkeypatch.chdir("a/b")
    layer, notes = plan()
    assert layer["dilated_size"] == [11, 11]
    assert layer["kernel_count"] > 5
    assert notes == ["note: defaults of ../pyproject.toml: rules=../my.yaml"]
    Path("../pyproject.toml").unlink()
    assert plan()[0]["kernel_count"] == 5
    Path("../.git").mkdir()  # the root of a repository
    assert plan()[1] == []


def test_the_search_ends_at_home(monkeypatch):
    write("kernel-count = 5\n", "dcls-convert.toml")
    Path("home/project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    monkeypatch.chdir("home/project")
    assert plan()[1] == []


def test_a_command_has_a_table_of_its_own():
    write(
        "kernel-count = 5\n[models]\nkernel-count = 7\njson = true\n[rules.check]\nmodel = 'test_resnet'\n",
        "dcls-convert.toml",
    )
    assert plan()[0]["kernel_count"] == plan(command="timm:" + TINY)[0]["kernel_count"] == 5
    out, err = run("models", TINY)
    assert json.loads(out)["models"][0]["kernel_counts"] == [7]
    assert "note: defaults of dcls-convert.toml: kernel-count=7, json=True" in err
    assert "conv3x3: converts" in run("rules", "check", "conv3x3")[0]


@pytest.mark.parametrize(
    ("text", "says"),
    {
        "dilated-sise = 9": "dilated-sise is no option of convert (did you mean 'dilated-size'?)",
        "dilated_size = 9": "dilated_size is no option of convert (did you mean 'dilated-size'?)",
        "[modles]": "modles is no command (did you mean 'models'?)",
        "[models]\nplan = 'x'": "models.plan is no option of models",
        "[rules.chekc]": "rules.chekc is no command (did you mean 'check'?)",
        "[rules]\ncheck = 1": "rules.check is no command",
        "model = 'os:getcwd'": "model is no option of convert",
        "strict = 1": "strict must be true or false, not 1",
        "budget = true": "budget must be a text or a number, not True",
        "tie = ['none']": "tie must be a text or a number",
        "scope = 'globe'": "Invalid value for '--scope': 'globe' is not one of",
        "dilated-size = -3": "'-3' is not a size",
        "trust-code = true": "trust-code must be given each time",
        "[fold]\ntrust-code = true": "fold.trust-code must be given each time, as --trust-code",
        "force = true": "force must be given each time, as --force",
        "a =": "not valid TOML",
        "a = '\\u001b]0;x'": "a is no option",
        "'\\u001b' = 1\n'a\\u001b\n": "not valid TOML",
        "\udcff": "not valid TOML",
        ".".join("a" * 100_000) + " = 1": "not valid TOML: a key of more than 1,000 parts",
        "x = {" + ".".join(['"a"'] * 100_000) + " = 1}": "not valid TOML: a key of more than 1,000 parts",
        "kernel-count = 0x" + "f" * 5000: "not valid TOML: an integer of more than 64 bits",
        "strict = [{a = 9223372036854775808}]": "not valid TOML: an integer of more than 64 bits",
        "scope = '" + "." * 2000 + "'": "Invalid value for '--scope'",
        "# " + "x" * MOST_BYTES: "has more than 1,048,576 bytes",
    }.items(),
)
def test_what_is_wrong_is_one_line(text, says):
    Path("dcls-convert.toml").write_text(text, errors="surrogateescape")
    out, err = run(TINY, "--dry-run", code=2)
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "dcls-convert.toml: " in err
    assert says in err
    assert all(character.isprintable() for character in err.strip())
    assert "Usage" in run("--help")[0]


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file():
    write("scope = 'stage'\n", "dcls-convert.toml")
    assert "toml" not in run(TINY, "--scope", "globe", code=2)[1]


def test_a_broken_file_of_another_project_does_not_matter():
    write("[tool.other\n")
    assert plan()[1] == []
