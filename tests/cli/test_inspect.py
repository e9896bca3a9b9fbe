"""`inspect --html`, `--picture` and `convert --html` as a user runs them, and their refusals in one
line.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from dcls_convert import load_converted, save_converted
from dcls_convert.checkpoints.folder import CARD, FILES, PAGE, PICTURE, read_plan
from dcls_convert.checkpoints.verify import check_model_in_this_process, verify_folder
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource
from dcls_convert.tuning import PositionTracker

from ..command_line import run
from ..views.parsed_page import page_data

NETWORK = "timm:test_efficientnet"
OPTIONS = ["--dilated-size", "7", "--input-size", "3x32x32", "-q"]
FACTORY = """
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
"""

TWO_WIDE = """
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 7, padding=3, groups=8))
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
    with open("page.html", encoding="utf-8") as file:
        return page_data(file.read())


def test_before_is_the_network_from_which_the_checkpoint_was_converted(checkpoint):
    fields = page_of(checkpoint)["receptiveFields"]
    assert [each["name"] for each in fields["maps"]] == ["Before", "After"]
    assert "random weights from which the checkpoint was converted" in fields["maps"][0]["what"]
    assert "4 images of seeded noise, 32x32 pixels" in fields["notes"][0]
    assert fields["maps"][0]["values"] != fields["maps"][1]["values"]

    model = load_converted(checkpoint)
    with torch.no_grad():
        model.conv_stem.weight.mul_(1.5)
    save_converted(model, checkpoint, "tuned", fingerprint=False)
    changed = page_of("tuned")["receptiveFields"]
    assert [each["name"] for each in changed["maps"]] == ["After"]
    assert "--original FILE" in changed["notes"][1]
    save_file(build_model(ModelSource(name=NETWORK), seed=0).state_dict(), "old.safetensors")
    picture = ("--picture", "field.svg", "--figure", "receptive-field")
    again = page_of("tuned", "--original", "old.safetensors", *picture)["receptiveFields"]
    before = again["maps"][0]
    assert Path("field.svg").read_bytes().startswith(b"<?xml")
    assert before["what"] == f"{NETWORK}, with the weights of old.safetensors"
    assert before["values"] == fields["maps"][0]["values"]


def test_images_and_their_size_may_be_given(checkpoint, here):
    (here / "photos").mkdir()
    for index in range(3):
        Image.new("RGB", (80, 50), (40 * index, 100, 200)).save(f"photos/{index}.png")
    fields = page_of(checkpoint, "--images", "photos", "--input-size", "3x48x48")["receptiveFields"]
    assert "3 images of photos, 48x48 pixels" in fields["notes"][0]
    assert fields["maps"][0]["pixels"] == [48, 48]


def test_a_folder_that_states_a_huge_size_costs_no_more(checkpoint):
    plan = replace(read_plan(checkpoint), input_size=(3, 9999, 9999))
    save_converted(load_converted(checkpoint), plan, "huge", fingerprint=False)
    fields = page_of("huge")["receptiveFields"]
    assert fields["maps"] == []
    (note,) = fields["notes"]
    assert note.endswith(
        "images of more than 1,048,576 pixels are run only if --input-size is given."
    )
    assert len(page_of("huge", "--input-size", "3x32x32")["receptiveFields"]["maps"]) > 0
    _, err = run("fold", "huge", code=2)
    states = "huge: its plan states images of 9999x9999 pixels"
    assert f"{states}; outputs are compared on 4,194,304 at most" in err


def test_a_model_of_the_users_own_is_built_with_trust_only(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "own_pictures_net.py").write_text(FACTORY)
    run("own_pictures_net:make", *OPTIONS, "--output", "net")
    data = page_of("net")
    trusted = page_of("net", "--trust-code")
    assert data["receptiveFields"] is None
    assert "--trust-code" in data["whyNotRebuilt"]
    assert len(trusted["receptiveFields"]["maps"]) == 2
    assert trusted["kernels"] == data["kernels"]  # there is no weight standardisation
    _, message = run("inspect", "net", "--picture", "x.png", "--figure", "receptive-field", code=2)
    assert "--trust-code" in message


def test_the_page_says_why_the_field_is_smaller_after_a_start_near_the_centre(here):
    """The kernels alone decide this field: random 7x7 before, elements in the middle after."""
    (here / "two_wide.py").write_text(TWO_WIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        for positions in ("normal", "uniform"):
            run(
                "two_wide:make",
                *["--dilated-size", "17", "--input-size", "3x32x32", "-q"],
                *["--positions", positions, "--output", positions],
            )
        notes = page_of("normal", "--trust-code")["receptiveFields"]["notes"]
        assert "smaller, because the elements of this layer are closer to the centre" in notes[-1]
        assert "instead of 2.65" in notes[-1]  # the mean distance of the cells of 7x7
        assert len(page_of("uniform", "--trust-code")["receptiveFields"]["notes"]) == len(notes) - 1


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
    assert rows[-1][1:3] == ["39", "0.25"]
    page = page_of(checkpoint, "--history", "positions.jsonl")
    assert [track["name"] for track in page["history"]["tracks"]] == [
        positions["row"]["name"] for positions in page["positions"]
    ]


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
        assert out == ""
        assert "positions.jsonl: is a record of another model; it follows " in message
    assert names(here) == {"other", "positions.jsonl"}


def test_the_record_of_an_unconverted_model_is_refused(checkpoint):
    PositionTracker(nn.Conv2d(3, 8, 3), "positions.jsonl").update(0)
    _, message = run("inspect", checkpoint, "--history", "positions.jsonl", code=2)
    assert "positions.jsonl: is a record of a model without positions" in message


REFUSED = {
    "--html page.html": "output page.html already exists; --force replaces it",
    "--html folder --force": "output folder is not a file",
    "--picture x.gif": "--picture x.gif must end in .png, .svg, .pdf",
    "--picture x.png --figure history": "--figure history needs --history",
    "--figure kernels": "--figure says what --picture draws",
    "--force": "--force has no effect without --html or --picture",
    "--history page.html": "page.html: line 1: ",
    "--history page.html --json": "--history is printed as text; omit --plan and --json",
    "--picture x.png --images folder": "--images, --original and --input-size are for --html",
    "--html x.html --images nowhere": "images nowhere: there is no such folder",
    "--html x.html --original nowhere": "original nowhere: there is no such file",
    "--html x.html --original page.html": "page.html",
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
    assert out == ""
    assert REFUSED[options] in message
    assert message.splitlines()[-1].startswith("error: ")
    assert sorted(here.rglob("*")) == before
    assert (here / "page.html").read_text() == "mine\n"


def test_without_matplotlib_pages_alone_are_drawn_and_one_line_names_the_extra(
    checkpoint, here, monkeypatch
):
    monkeypatch.setattr("dcls_convert.picture_output.PLOT_LIBRARY", "no_such_library")
    _, message = run("inspect", checkpoint, "--picture", "x.png", code=2)
    assert "pip install no_such_library" in message
    out, _ = run("inspect", checkpoint, "--json", "--html", "page.html")
    assert json.loads(out)["format"] == 1
    assert names(here) == {"page.html"}
    _, message = run(NETWORK, *OPTIONS[:-1], "--html", "--output", "net")
    assert names(here / "net") == {*FILES, PAGE}
    assert "matplotlib is missing" in message
    assert PICTURE not in (here / "net" / CARD).read_text(encoding="utf-8")


def test_a_folder_holds_its_page_and_its_card_the_picture_until_it_is_replaced(here):
    run(NETWORK, *OPTIONS, "--html", "--output", "net")
    folder = here / "net"
    assert names(folder) == {*FILES, PAGE, PICTURE}
    data = page_data((folder / PAGE).read_text(encoding="utf-8"))
    assert (data["title"], data["receptiveFields"]) == ("net", None)
    assert all(shown["heat"] for shown in data["positions"])
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE})" in (folder / CARD).read_text(encoding="utf-8")
    verification = verify_folder(folder, check_model=check_model_in_this_process)
    assert verification.ok
    assert "other files" not in [check.name for check in verification.checks]
    run(NETWORK, *OPTIONS, "--output", "net", "--force")
    assert names(folder) == set(FILES)
    assert PICTURE not in (folder / CARD).read_text(encoding="utf-8")
