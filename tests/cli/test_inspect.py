"""`inspect --html`, `--picture` and `convert --html` as a user runs them, and their refusals in one
line.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dcls_convert import load_converted
from dcls_convert.checkpoints.folder import CARD, FILES, PAGE, PICTURE
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.tuning import PositionTracker

from ..command_line import run

NETWORK = "timm:test_efficientnet"
OPTIONS = ["--dilated-size", "7", "--input-size", "3x32x32", "-q"]
FACTORY = """
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "net"
    run(NETWORK, *OPTIONS, "--output", folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return {path.name for path in folder.iterdir()}


def page_of(checkpoint, *options):
    run("inspect", checkpoint, "--html", "page.html", "--force", *options)
    return Path("page.html").read_text(encoding="utf-8")


def test_a_model_of_the_users_own_is_built_with_trust_only(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "own_pictures_net.py").write_text(FACTORY)
    run("own_pictures_net:make", *OPTIONS, "--output", "net")
    reason = "Kernels are made from the stored weights: "
    assert reason in page_of("net")
    assert reason not in page_of("net", "--trust-code")


def track(folder, path, steps):
    """Record a training in which every coordinate moves by a quarter of a cell per step."""
    model = load_converted(folder)
    tracker = PositionTracker(model, path)
    for step in range(steps):
        tracker.update(step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("positions"):
                    parameter.add_(0.25)


def test_the_record_of_a_training_is_printed_under_the_names_of_the_inspection(checkpoint):
    track(checkpoint, "positions.jsonl", 40)
    inspected, recorded = run("inspect", checkpoint, "--history", "positions.jsonl")[0].split(
        "Positions  ", 2
    )[1:]
    assert "of 40 recorded steps" in recorded
    lines = [line.split() for line in recorded.splitlines()]
    assert "blocks.3.0.conv_dw  " in inspected
    rows = [line for line in lines if line[:1] == ["blocks.3.0.conv_dw"]]
    assert rows[0][1] == "0"
    assert rows[-1][1:3] == ["39", "0.25000"]
    page = page_of(checkpoint, "--history", "positions.jsonl")
    assert page.count("Some of the elements during the training") == page.count("<h2>") - 1


def test_the_record_of_a_model_inside_another_is_that_of_the_model(checkpoint):
    model = nn.Sequential(load_converted(checkpoint))
    PositionTracker(model, "positions.jsonl").update(0)
    out, _ = run("inspect", checkpoint, "--history", "positions.jsonl")
    assert "blocks.3.0.conv_dw  " in out.split("Positions  ", 2)[2]


@pytest.mark.parametrize("other", [[NETWORK, "--dilated-size", "9"], ["timm:test_convnext"]])
def test_the_record_of_another_model_is_refused(checkpoint, here, other):
    run(*other, "--input-size", "3x32x32", "-q", "--output", "other")
    track("other", "positions.jsonl", 2)
    for options in ([], ["--html", "page.html"], ["--picture", "x.png", "--figure", "history"]):
        command = ["inspect", checkpoint, "--history", "positions.jsonl", *options]
        out, message = run(*command, code=2)
        assert out == "" or json.loads(out)["exit_code"] == 2
        assert "positions.jsonl: is a record of another model; it follows " in message
    assert names(here) == {"other", "positions.jsonl"}


def test_the_record_of_an_unconverted_model_is_refused(checkpoint):
    PositionTracker(nn.Conv2d(3, 8, 3), "positions.jsonl").update(0)
    _, message = run("inspect", checkpoint, "--history", "positions.jsonl", code=2)
    assert "positions.jsonl: is a record of a model without positions" in message


REFUSED = {
    "--html page.html": "output page.html already exists; name another",
    "--html folder --force": "output folder is not a file",
    "--picture x.gif": "--picture x.gif must end in .png, .svg, .pdf",
    "--picture x.png --figure history": "--figure history needs --history",
    "--figure kernels": "--figure kernels needs a file to draw it into: add --picture FILE.png",
    "--figure positions": "--figure positions needs a file to draw it into",
    "--quiet": "--quiet would print nothing; it is for --html and --picture",
    "--force": "--force has no effect without --html or --picture",
    "--history page.html": "page.html: line 1: ",
    "--history page.html --json": "--history is printed as text; omit --plan and --json",
    "--html x.html --history nowhere": "history nowhere: there is no such file",
    "--html x.html --history page.html": "page.html: line 1: ",
    "--html x.html --plan": "--plan prints the plan alone",
}


@pytest.mark.parametrize("options", REFUSED)
def test_mistakes_are_one_line_and_leave_nothing(checkpoint, here, options):
    (here / "page.html").write_text("mine\n")
    (here / "folder").mkdir()
    before = sorted(here.rglob("*"))
    out, message = run("inspect", checkpoint, *options.split(), code=2)
    assert out == "" or json.loads(out)["exit_code"] == 2
    assert REFUSED[options] in message
    assert message.splitlines()[-1].startswith("error: ")
    assert sorted(here.rglob("*")) == before
    assert (here / "page.html").read_text() == "mine\n"


@pytest.mark.parametrize("library", ["FIGURE_LIBRARY", "PAGE_LIBRARY"])
def test_without_the_extra_one_line_names_it(checkpoint, here, monkeypatch, library):
    module = "dcls_convert.cli.inspect" if library == "PAGE_LIBRARY" else None
    monkeypatch.setattr(f"{module or 'dcls_convert.output'}.{library}", "no_such_library")
    option = {"FIGURE_LIBRARY": "--picture x.png", "PAGE_LIBRARY": "--html x.html"}[library]
    _, message = run("inspect", checkpoint, *option.split(), code=2)
    assert "needs the extra plot: pip install no_such_library" in message
    monkeypatch.setattr(f"dcls_convert.cli.convert.{library}", "no_such_library")
    _, message = run(NETWORK, *OPTIONS[:-1], "--html", "--output", "net", code=2)
    assert "--html needs the extra plot: pip install no_such_library" in message
    assert names(here) == set()


def test_a_quiet_inspection_prints_the_names_of_its_files(checkpoint):
    options = ["--html", "page.html", "--picture", "kernels.svg", "--figure", "kernels"]
    assert run("inspect", checkpoint, *options, "--quiet") == ("page.html\nkernels.svg\n", "")


def test_a_folder_holds_its_page_and_its_card_the_picture_until_it_is_replaced(here):
    run(NETWORK, *OPTIONS, "--html", "--output", "net")
    folder = here / "net"
    assert names(folder) == {*FILES, PAGE, PICTURE}
    assert "<h1>net</h1>" in (folder / PAGE).read_text(encoding="utf-8")
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE})" in (folder / CARD).read_text(encoding="utf-8")
    verification = verify_folder(folder)
    assert verification.ok
    assert "other files" not in [check.name for check in verification.checks]
    run(NETWORK, *OPTIONS, "--output", "net", "--force")
    assert names(folder) == set(FILES)
    assert PICTURE not in (folder / CARD).read_text(encoding="utf-8")
