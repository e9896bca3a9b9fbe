"""README and examples do what they say."""

import ast
import re
import runpy
import shlex
import xml.etree.ElementTree
from pathlib import Path

import pytest

import dcls_convert
from dcls_convert.planning.rules import parse_rules

from .command_line import run
from .conftest import TINY

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_first_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["first_steps.py"])
    runpy.run_path(str(ROOT / "examples" / "first_steps.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "loaded by timm, outputs equal: True" in out


def test_the_picture_is_the_programs_own_output(tmp_path, monkeypatch):
    def words(path: Path) -> list[str]:
        texts = xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        return " ".join("".join(text.itertext()) for text in texts).replace("\xa0", " ").split()

    monkeypatch.setattr("sys.argv", ["render_report.py", str(tmp_path / "new.svg")])
    runpy.run_path(str(ROOT / "examples" / "render_report.py"), run_name="__main__")
    assert words(tmp_path / "new.svg") == words(ROOT / "examples" / "report.svg")
    assert "28,587,688" in words(ROOT / "examples" / "report.svg")


def test_readme_has_one_command_for_the_main_job_and_one_for_the_tests():
    commands = [line for line in README.splitlines() if "pip install" in line]
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv") for command in commands)
    assert commands[0].endswith(".venv/bin/dcls-convert convnext_tiny --dilated-size 17")


PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
LINES = [
    line for page in PAGES.values() for line in re.findall(r"^dcls-convert (?!mypackage)(.+?)(?: +#.*)?$", page, re.M)
]
OTHERS = ("models", "inspect", "fold")


@pytest.mark.parametrize("line", sorted({line for line in LINES if line.split()[0] not in OTHERS}))
def test_commands_of_the_pages_are_accepted(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [part for part in line.split() if part != "--dry-run"]
    run(*arguments, "--dry-run")


@pytest.mark.processes
def test_commands_on_a_folder_do_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for line in LINES if line.split()[0] in OTHERS]
    assert [line[0] for line in lines] == list(OTHERS)
    lines[0][1] = f"{TINY}*"  # instead of many larger ones
    verify = ["verify", "convnext_tiny-dcls17"]
    for line in [[TINY, "--output", "convnext_tiny-dcls17"], verify, *lines, ["rules", "show", "depthwise"]]:
        run(*line)
    assert (tmp_path / "convnext_tiny-dcls17-folded" / "config.json").is_file()


def test_rules_of_the_pages_are_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGES["docs/rules.md"], re.DOTALL)
    assert len(parse_rules(text).rules) == 3


@pytest.mark.parametrize("page", PAGES)
def test_links_and_names_of_the_pages_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("dcls_convert.", "tuning.")):
                home = dcls_convert if ast.unparse(node).startswith("dcls_convert.") else dcls_convert.tuning
                assert hasattr(home, ast.unparse(node).split(".")[1]), ast.unparse(node)
