"""README and the pages of the site: every command and snippet in them runs, and every picture and
reference is up to date.

The blocks of a page run in order, in one empty folder: the lines of `console` blocks as commands,
`python` blocks in one namespace. A block with a title is a file of that name. The line below a
`$ ` line is the last that the command prints, or its beginning if it ends in `...`.
"""

import contextlib
import html
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import timm
import torch

import dcls_convert
from dcls_convert.cli.app import main

from .conftest import TINY
from .hub_cache import upload
from .image_folder import write_images

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
}
README = PAGES["README.md"]
# Pages that the plain tests leave out: those that take long, and those that need other libraries,
# whose warnings are ignored.
IN_PROCESSES = [pytest.mark.processes]
IN_THIRDPARTY = [pytest.mark.thirdparty, pytest.mark.filterwarnings("ignore")]
LONG = (
    "README",
    "checkpoints",
    "choosing",
    "compare",
    "convert",
    "deploying",
    "errors",
    "fsdp2",
    "starts",
    "timm",
    "training",
)
MARKS = {f"{page}.md": IN_PROCESSES for page in LONG}
MARKS |= dict.fromkeys(("lightning.md", "trainer.md", "libraries.md"), IN_THIRDPARTY)
# Replacements before a page is run: page -> text in the page -> text that is run.
SMALL = {"convnext_tiny": TINY}  # .ci/run runs the real one
STAND_INS = dict.fromkeys(("convert.md", "deploying.md", "hub.md", "index.md", "python.md"), SMALL)
COMPARE = {"examples/compare.py": str(ROOT / "examples" / "compare.py")}
QUICK = COMPARE | {
    "--sizes 17 --seeds 5 --epochs 30": (
        "--sizes 17 --seeds 1 --epochs 1 --batch-size 4 --input-size 3 32 32"
    )
}
# With the size that the real network gets.
FITTED = {"convnext_tiny --pretrained": f"{TINY} --pretrained --dilated-size 17"}
FINETUNE = {
    "examples/finetune.py": str(ROOT / "examples" / "finetune.py"),
    "--data photographs": "--data photographs --epochs 1 --batch-size 4 --input-size 3 32 32",
}
ON_CPU = {" --device cuda": ""}
STAND_INS["README.md"] = FITTED | SMALL | QUICK | FINETUNE | ON_CPU | {"convnext_*": f"{TINY}*"}
STAND_INS["compare.md"] = (
    SMALL
    | QUICK
    | {"--seeds 3 --epochs 4": "--seeds 1 --epochs 1 --batch-size 256 --augmentation none"}
)
STAND_INS["checkpoints.md"] = SMALL | {"1, 3, 224, 224": "1, 3, 160, 160"}
STAND_INS["starts.md"] = SMALL | {"tf_efficientnet_lite0": "test_efficientnet"}
STAND_INS["timm.md"] = SMALL | {
    "--amp": (
        "--output output/train/run --device cpu --epochs 1 --batch-size 4 --workers 0 --mixup 1"
    ),
    "path/to/": "scripts/",
}
STAND_INS["training.md"] = FITTED | SMALL | FINETUNE
# Lines that are tested elsewhere: .ci/run makes such environments in a shell, and the test of the
# pictures surveys models.
ELSEWHERE = re.compile(r"python3 -m venv |\. \.venv/|pip install |dcls-convert models 'timm:")
HERE_DOCUMENT = re.compile(r"^cat > (\S+) <<'YAML'\n(.*?)^YAML\n", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str | None
    text: str
    line: int  # of its first line in the page


def blocks_of(text: str) -> list[Block]:
    matches = re.finditer(
        r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL
    )
    return [Block(*match.groups(), text.count("\n", 0, match.start(3)) + 1) for match in matches]


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block without its comment, and the line below it or ""."""
    if re.search(r"^\$ ", text, re.MULTILINE):
        entries = re.split(r"^\$ ", text, flags=re.MULTILINE)
    else:
        entries = text.replace("\\\n", " ").splitlines()
    commands = []
    for entry in entries:
        if entry:
            line, _, printed = entry.partition("\n")
            commands.append((re.sub(r" +#.*", "", line), printed))
    return commands


# Files that the reader of a page has already.


def write_own_model() -> None:
    Path("mypackage").mkdir()
    Path("mypackage/models.py").write_text(
        f"import timm\n\ndef build():\n    return timm.create_model('{TINY}')\n"
    )
    torch.save(timm.create_model(TINY).state_dict(), "weights.pt")
    Path("rules.yaml").write_text(
        "format: 1\nrules:\n  - match: {kind: depthwise}\n    dilated_size: 9\n"
    )


def write_trained_weights() -> None:
    from safetensors.torch import save_model

    save_model(timm.create_model(TINY), "weights.safetensors")
    save_model(timm.create_model("test_efficientnet"), "lite0.safetensors")
    write_images(Path("photos"))


BUILDS_ITS_MODEL = """
import sys
import timm

timm.create_model(sys.argv[sys.argv.index("--model") + 1], pretrained=True)
"""


def write_timm_scripts() -> None:
    Path("scripts").mkdir()
    shutil.copy(Path(__file__).parent / "tuning" / "small_train.py", "scripts/train.py")
    for name in ("validate", "benchmark"):
        Path(f"scripts/{name}.py").write_text(BUILDS_ITS_MODEL)
    write_images(Path("flowers"))


def convert_and_write_images() -> None:
    run_program(["dcls-convert", TINY, "--dilated-size", "17"])
    write_images(Path("photographs"))


PREPARATIONS = {
    "README.md": convert_and_write_images,
    "compare.md": lambda: write_images(Path("photographs")),
    "convert.md": write_own_model,
    "starts.md": write_trained_weights,
    "timm.md": write_timm_scripts,
    "training.md": lambda: write_images(Path("photographs")),
}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replace the trained weights that timm would download by random ones."""

    def download(repo_id, filename, **_options):
        folder = tmp_path / "hub" / repo_id
        if not folder.exists():
            name = repo_id.partition("/")[2].partition(".")[0]
            timm.models.save_for_hf(timm.create_model(name), folder, safe_serialization=True)
        return str(folder / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)


# Running.


def run_program(arguments: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed.

    It runs in this process, or in a process of its own if it starts others.
    """
    if arguments[0] == "torchrun":
        return run_python("-m", "torch.distributed.run", *arguments[1:])
    if arguments[:2] == ["python", "-m"]:
        return run_python(*arguments[1:])
    printed = io.StringIO()
    code = 0
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", arguments[1:])
        try:
            if arguments[0] == "dcls-convert":
                main(arguments[1:])
            elif arguments[0] == "python":
                patch.syspath_prepend(str(Path(arguments[1]).parent))
                runpy.run_path(arguments[1], run_name="__main__")
            else:
                raise AssertionError(f"{arguments[0]}: no test runs this")
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, printed.getvalue()


def run_python(*arguments: str) -> tuple[int, str]:
    """Run Python in a process of its own; return its exit code and all that it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def run_console(text: str) -> None:
    """Run the commands of a console block; check exit codes, and last lines that are shown."""
    for name, content in re.findall(HERE_DOCUMENT, text):
        Path(name).write_text(content)
    for command, expected in commands_of(re.sub(HERE_DOCUMENT, "", text)):
        if ELSEWHERE.match(command):
            continue
        code, printed = run_program(shlex.split(command))
        assert (code != 0) == expected.startswith("error: "), f"{command}\n{printed}"
        if expected:
            start, more, _ = expected.rstrip().partition("...")
            last = printed.rstrip().splitlines()[-1]
            matches = last.startswith(start) if more else last == start
            assert matches, f"{command}\n{last}\n{expected}"


def upload_into_cache(hub: Path, monkeypatch) -> None:
    """Replace uploads to the hub by uploads into the cache of its client."""

    def create(*names, **_):
        return SimpleNamespace(repo_id=names[-1])

    def push(*_, repo_id, folder_path, **__):
        return upload(Path(folder_path), repo_id, hub)

    for owner in ("huggingface_hub", "huggingface_hub.HfApi"):
        monkeypatch.setattr(f"{owner}.create_repo", create)
        monkeypatch.setattr(f"{owner}.upload_folder", push)
    # timm asks whether there is a model card.
    monkeypatch.setattr("huggingface_hub.HfApi.file_exists", lambda *_, **__: False)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm leaves images open
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page, ())) for page in PAGES])
def test_commands_and_snippets_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, request):
    for library in re.findall(r"`pip install (\w+)", PAGES[page]):
        pytest.importorskip(library, reason=f"{library} is in the extra thirdparty")
    if page == "hub.md":
        upload_into_cache(request.getfixturevalue("hub"), monkeypatch)
    elif page != "errors.md":  # which shows what happens without a network
        request.getfixturevalue("trained")
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path / "reader")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend("")  # as in a shell
    torch.manual_seed(0)
    PREPARATIONS.get(page, lambda: None)()
    text = PAGES[page]
    for name, stand_in in STAND_INS.get(page, {}).items():
        assert name in PAGES[page], f"{name}: no longer in the page"
        text = text.replace(name, stand_in)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(text):
        if block.title is not None:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(DOCS / page), "exec"), namespace)
        elif block.language == "console":
            run_console(block.text)
        elif block.language != "bibtex":  # test_citation.py reads these
            raise AssertionError(
                f"{page}:{block.line}: nothing runs a block of {block.language or 'no language'}"
            )


# README.


def test_readme_has_one_command_for_the_main_job_and_one_for_the_tests():
    commands = [
        line for line in README.splitlines() if "pip install" in line and line.startswith("python3")
    ]
    assert len(commands) == 2
    assert commands[0].endswith("&& dcls-convert convnext_tiny --dilated-size 17")
    assert commands[1].endswith(".venv-test/bin/pytest -q")


# The site.


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_exist(page):
    folder = ROOT if page == "README.md" else DOCS
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (folder / target).exists(), target


def test_files_of_the_repository_that_the_pages_name_exist():
    texts = [*PAGES.values()]
    texts += [
        (ROOT / page).read_text(encoding="utf-8") for page in ("SECURITY.md", "CONTRIBUTING.md")
    ]
    for text in texts:
        for path in re.findall(r"`(?:python )?((?:tests|benchmarks|examples|docs)/[^` ]+)", text):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_pictures_of_the_pages_have_texts_that_say_what_is_seen(page):
    for alt in re.findall(r"!\[([^]]*)\]", PAGES[page]):
        assert len(alt) > 10, alt


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs", reason="mkdocs is in the extra docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("hooks")


def test_the_reference_has_every_command_option_rule_and_name(hooks):
    """Compared with what the program prints, with the schema, and with the public names."""
    command_line = hooks.command_line()
    rules = hooks.rules()
    names = hooks.python_names()
    commands = re.findall(r"^## dcls-convert ?(.*)$", command_line, re.MULTILINE)
    assert {"", "convert", "rules check"} < set(commands)
    for command, section in zip(commands, command_line.split("\n## "), strict=True):
        _, printed = run_program(["dcls-convert", *command.split(), "--help"])
        for options in re.findall(
            r"^│ ([ *]{0,4}--?[a-z][a-z-]*(?:[ *]*--?[a-z][a-z-]*)*)", printed, re.MULTILINE
        ):
            assert all(re.search(rf"[` ]{option}[` ,]", section) for option in options.split()), (
                command,
                options,
            )
        for inner in re.findall(
            r"^│ ([a-z]+)  ", printed.partition("─ Commands ─")[2], re.MULTILINE
        ):
            assert f"{command} {inner}".strip() in commands
    schema = json.loads(run_program(["dcls-convert", "rules", "schema"])[1])
    for part in (schema, *schema["$defs"].values()):
        assert all(f"| `{key}` | " in rules for key in part["properties"])
    public = [*dcls_convert.__all__, *dcls_convert.tuning.__all__]
    listed = {line.rpartition(".")[2] for line in names.splitlines() if line.startswith("::: ")}
    assert listed == {*public} - {"__version__", "depthwise", "tuning"}


REPOSITORY = "https://example.org/dcls-convert"


@pytest.fixture(scope="module")
def site(hooks, tmp_path_factory):
    """Build the site for a repository; return the texts of its pages by path."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    environment = {"NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": REPOSITORY}
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | environment)
    pages = {
        path: path.read_text(encoding="utf-8")
        for path in folder.rglob("*.html")
        if path.name != "404.html"
    }
    assert len(pages) > 20
    return pages


@pytest.mark.processes
def test_pages_of_the_site_say_the_version_and_lead_to_their_sources(site):
    for text in site.values():
        assert f"dcls-convert {dcls_convert.__version__}" in text
        (source,) = re.findall(rf'href="?{re.escape(REPOSITORY)}/edit/main/([^" >]+)', text)
        assert (ROOT / source).is_file()


@pytest.mark.processes
def test_signatures_on_the_site_show_values(site):
    (api,) = [text for path, text in site.items() if path.parent.name == "api"]
    text = html.unescape(re.sub("<[^>]*>", "", api))
    assert 'scope: Literal["auto", "model", "error"] = "auto"' in text
    assert re.findall(r"[=:] ?[A-Z]{3,}\w*", text) == []


@pytest.mark.processes
def test_links_of_the_built_site_lead_somewhere(site):
    for path, text in site.items():
        for link in re.findall(r'(?:href|src)="?([^" >]+)', text):
            target, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", target) or target.startswith("//"):
                continue
            linked = (path.parent / urllib.parse.unquote(target)).resolve() if target else path
            linked = linked / "index.html" if linked.is_dir() else linked
            assert linked.exists(), (path, link)
            if anchor and linked.suffix == ".html":
                assert re.search(rf'id="?{re.escape(anchor)}[" >]', site[linked]), (path, link)


@pytest.mark.browser
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("width", [1280, 390])
def test_code_and_pictures_of_the_site_fit(site, browser, width):
    too_wide = """() => [...document.querySelectorAll("pre > code, article img")].filter(
        node => node.scrollWidth > node.clientWidth
        || node.getBoundingClientRect().right > document.documentElement.clientWidth
    ).map(node => node.src || node.innerText)"""
    page = browser.new_page(viewport={"width": width, "height": 900})
    for path in site:
        page.goto(path.as_uri())
        assert page.evaluate(too_wide) == [], path
    page.close()


@pytest.mark.processes
def test_the_pictures_are_the_programs_own_output(tmp_path):
    def words(path: Path) -> list[str]:
        texts = xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        return " ".join("".join(text.itertext()) for text in texts).replace("\xa0", " ").split()

    script = DOCS / "draw_pictures.py"
    for command in re.findall(
        r"^dcls-convert models 'timm:.*", "\n".join(PAGES.values()), re.MULTILINE
    ):
        assert command in script.read_text(encoding="utf-8"), command
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    names = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert names
    for name in names:
        assert words(tmp_path / name) == words(DOCS / "pictures" / name), (
            f"{name}: python docs/draw_pictures.py"
        )
        assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", (tmp_path / name).read_text())
    assert "28,587,688" in words(DOCS / "pictures" / "report.svg")
