"""The documents: commands and snippets of README and the site's pages run, links lead to files, and
pictures are what the program prints.

The blocks of a page run in order, in one folder: `python` blocks in one namespace, the lines of
`console` blocks as commands. A block with a title is a file of that name. The line below a `$ ` is
the last that the command prints, or its beginning if it ends in `...`. A block with a CUDA graph
needs a GPU.
"""

import ast
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_model

import dcls_convert
from dcls_convert.checkpoints.card import CITATION

from .command_line import run_to_end
from .conftest import TINY
from .hub_cache import upload
from .image_folder import write_images

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
}
# Of the extra thirdparty. Where one is missing, the rest of a section that names it is left out.
OTHER_LIBRARIES = ("lightning", "transformers")
CUDA_GRAPH = "torch.cuda.CUDAGraph"
# Text in the pages, and what is run in its place: small networks, and few images and epochs. Where
# several begin at one place, the longest one is replaced; what is put in its place stays.
STAND_INS = {
    "python examples/": f"python {ROOT}/examples/",
    "convnext_tiny --pretrained": f"{TINY} --pretrained --dilated-size 17",  # as the real one gets
    "convnext_tiny": TINY,
    "convnext_*": f"{TINY}*",
    "tf_efficientnet_lite0": "test_efficientnet",
    "1, 3, 224, 224": "1, 3, 160, 160",
    " --device cuda": "",
    "--data photographs": "--data photographs --epochs 1 --batch-size 4 --input-size 3 32 32",
    "--seeds 5 --epochs 30": "--seeds 1 --epochs 1",
    "--seeds 3 --epochs 4": "--seeds 1 --epochs 1 --batch-size 256 --augmentation none",
    "--amp": "--output output/train/run --device cpu --epochs 1 --batch-size 4 --mixup 1",
    "path/to/": "scripts/",
}
# .ci/run makes environments as README does, and `docs/draw_pictures.py` surveys models.
ELSEWHERE = (
    "python3 -m venv",
    ". .venv",
    "pip install",
    ".venv-test",
    "dcls-convert models 'timm:",
)


def run_program(words: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed."""
    if words[0] == "dcls-convert":  # in this process, which has imported torch already
        code, out, err = run_to_end(*words[1:])
        return code, out + err if code else err + out
    program = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def run_console(text: str) -> None:
    """Run the commands of a console block; check exit codes, and last lines that are shown."""
    entries = text.replace("\\\n", " ").splitlines()
    if text.startswith("$ "):
        entries = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    for entry in entries:
        line, _, expected = entry.partition("\n")
        command = re.sub(" +#.*", "", line).rpartition("&& ")[2]
        if not command or command.startswith(ELSEWHERE):
            continue
        code, printed = run_program(shlex.split(command))
        assert (code != 0) == expected.startswith("error: "), f"{command}\n{printed}"
        if expected:
            start, more, _ = expected.rstrip().partition("...")
            last = printed.rstrip().splitlines()[-1]
            assert last == start or (more and last.startswith(start)), f"{command}\n{last}"


def write_files_of_readers() -> None:
    """Write the images, weights, rules and scripts that readers of the pages have already."""
    for folder in ("photographs", "photos", "flowers"):
        write_images(Path(folder))
    torch.save(timm.create_model(TINY).state_dict(), "weights.pt")
    save_model(timm.create_model(TINY), "weights.safetensors")
    save_model(timm.create_model("test_efficientnet"), "lite0.safetensors")
    Path("mypackage").mkdir()
    build = f"import timm\n\ndef build():\n    return timm.create_model('{TINY}')\n"
    Path("mypackage/models.py").write_text(build)
    rules = "format: 1\nrules: [{match: {kind: depthwise}, dilated_size: 9}]\n"
    Path("rules.yaml").write_text(rules)
    # timm's scripts.
    Path("scripts").mkdir()
    shutil.copy(Path(__file__).parent / "tuning" / "small_train.py", "scripts/train.py")
    build = "timm.create_model(sys.argv[sys.argv.index('--model') + 1], pretrained=True)\n"
    for name in ("validate", "benchmark"):
        Path(f"scripts/{name}.py").write_text(f"import sys\nimport timm\n\n{build}")


def fill_hub(hub: Path, monkeypatch) -> None:
    """Put random weights into the hub's cache, for timm's trained ones; upload to this cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))  # for processes that are started
    model = timm.create_model(TINY)
    timm.models.save_for_hf(model, "trained", safe_serialization=True)
    upload(Path("trained"), model.pretrained_cfg["hf_hub_id"], hub)

    def push(*_, repo_id, folder_path, **__):
        return upload(Path(folder_path), repo_id, hub)

    for owner in ("huggingface_hub", "huggingface_hub.HfApi"):
        monkeypatch.setattr(f"{owner}.create_repo", lambda *names, **_: Mock(repo_id=names[-1]))
        monkeypatch.setattr(f"{owner}.upload_folder", push)
    # timm asks whether there is a model card.
    monkeypatch.setattr("huggingface_hub.HfApi.file_exists", lambda *_, **__: False)


@pytest.mark.processes
@pytest.mark.thirdparty
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm's images
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```" in text])
def test_commands_and_snippets_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, hub):
    text = PAGES[page]
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path / "reader")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend("")  # as in a shell
    torch.manual_seed(0)
    if "\nerror: " not in text:  # else it shows what happens without files and without a network
        write_files_of_readers()
        fill_hub(hub, monkeypatch)
        longest_first = sorted(STAND_INS, key=len, reverse=True)
        text = re.sub("|".join(map(re.escape, longest_first)), lambda m: STAND_INS[m[0]], text)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for section in re.split("^## ", text, flags=re.MULTILINE):
        run_blocks(section, page, namespace)


def run_blocks(section: str, page: str, namespace: dict[str, object]) -> None:
    """Run the blocks of a section, up to one that needs a library that is not installed."""
    blocks = r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$'
    for language, title, block in re.findall(blocks, section, re.MULTILINE | re.DOTALL):
        libraries = [name for name in OTHER_LIBRARIES if name in block]
        if any(importlib.util.find_spec(name) is None for name in libraries):
            return
        if CUDA_GRAPH in block and not torch.cuda.is_available():
            continue
        if title:
            Path(title).write_text(block)
        elif language == "python":
            with warnings.catch_warnings():
                if libraries:
                    warnings.simplefilter("ignore")
                exec(compile(block, page, "exec"), namespace)
        elif language == "console":
            run_console(block)
        else:
            assert language == "bibtex", f"{page}: nothing runs a block of {language!r}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_replay_of_the_cuda_graph_trains_as_an_eager_step_does():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES["speed.md"], re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if CUDA_GRAPH in block]
    namespace: dict[str, Any] = {}
    exec(compile(block.replace("convnext_tiny", TINY), "speed.md", "exec"), namespace)
    model, optimizer = namespace["model"], namespace["optimizer"]
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    trained = [*model.parameters(), *states]
    start = [tensor.detach().clone() for tensor in trained]

    def change() -> torch.Tensor:
        pairs = zip(model.parameters(), start, strict=False)  # `start` has the states, too
        return torch.cat([(now - before).detach().flatten() for now, before in pairs])

    namespace["graph"].replay()
    replayed = change()
    with torch.no_grad():
        for tensor, before in zip(trained, start, strict=True):
            tensor.copy_(before)
    namespace["step"]()
    stepped = change()
    assert stepped.norm() > 0
    assert (replayed - stepped).norm() < 0.05 * stepped.norm()  # sums in another order

    for group in optimizer.param_groups:
        group["lr"].zero_()
    namespace["graph"].replay()  # clamps positions that the last step moved out of the window
    start = [tensor.detach().clone() for tensor in trained]
    namespace["graph"].replay()
    assert change().norm() == 0


def test_warnings_that_a_page_lists_are_in_the_program():
    """Readers search the page for the words of a message."""
    package = Path(dcls_convert.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")]
    nodes = itertools.chain.from_iterable(map(ast.walk, trees))
    texts = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    table = PAGES["errors.md"].partition("## Warnings")[2].partition("## ")[0]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(messages) >= 10
    assert [message for message in messages if message not in texts] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_to_files(page):
    folder = ROOT if page == "README.md" else DOCS
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGES[page]):
        assert (folder / target).exists(), target


@pytest.mark.processes
def test_the_pictures_are_the_programs_own_output(tmp_path):
    def words(path: Path) -> list[str]:
        texts = xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
        return " ".join("".join(text.itertext()) for text in texts).replace("\xa0", " ").split()

    script = DOCS / "draw_pictures.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    assert list(tmp_path.glob("*.svg"))
    for path in tmp_path.glob("*.svg"):
        assert words(path) == words(DOCS / "pictures" / path.name), f"python {script}"


def test_the_citations_are_those_of_this_version():
    assert f"```bibtex\n{CITATION}```\n" in PAGES["README.md"]
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(cff["version"]) == dcls_convert.__version__
