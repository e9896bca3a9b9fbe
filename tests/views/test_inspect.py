"""`inspect --html` and `--picture`: as their user runs them, and what is refused in one line."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dcls_convert import load_converted, save_converted
from dcls_convert.checkpoints.folder import CONFIG
from dcls_convert.files import PICTURE_SUFFIXES
from dcls_convert.networks.source import ModelSource, build_model
from dcls_convert.options import FigureName
from dcls_convert.tuning import PositionTracker

from ..checkpoints.folders import edit_json, seal
from ..command_line import run
from ..conftest import TINY
from .test_page import data_of

MAGIC = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF-"}
CONVERT = [f"timm:{TINY}", "--dilated-size", "9", "--input-size", "3x64x64", "-q"]
FACTORY = "import timm\n\ndef make():\n    return timm.create_model('test_convnext', num_classes=3)\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "net"
    run(*CONVERT, "--output", folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def history(checkpoint, here):
    """Of a model whose positions move one cell to the right, and stop there."""
    model = load_converted(checkpoint)
    tracker = PositionTracker(model, "positions.jsonl")
    for step in range(4):
        tracker.update(step)
        if step == 1:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("positions"):
                        parameter[1] += 1
    return "positions.jsonl"


def page_of(checkpoint, *options):
    run("inspect", checkpoint, "--html", "page.html", "--force", *options)
    with open("page.html", encoding="utf-8") as file:
        return data_of(file.read())


def test_before_is_the_network_from_which_the_checkpoint_was_converted(checkpoint, here):
    fields = page_of(checkpoint)["fields"]
    assert [one["name"] for one in fields["maps"]] == ["Before", "After"]
    assert "random weights from which the checkpoint was converted" in fields["maps"][0]["what"]
    assert "4 images of seeded noise, 64x64 pixels" in fields["notes"][0]
    assert fields["maps"][0]["values"] != fields["maps"][1]["values"]


def test_a_changed_network_has_a_before_with_its_old_weights_alone(checkpoint, here):
    model = load_converted(checkpoint)
    with torch.no_grad():
        model.stem[0].weight.mul_(1.5)
    save_converted(model, checkpoint, "tuned", fingerprint=False)
    fields = page_of("tuned")["fields"]
    assert [one["name"] for one in fields["maps"]] == ["After"]
    assert "--original FILE" in fields["notes"][1]
    old = build_model(ModelSource(name=f"timm:{TINY}"), seed=0)
    save_file(old.state_dict(), "old.safetensors")
    shown = page_of("tuned", "--original", "old.safetensors")["fields"]["maps"]
    assert shown[0]["what"] == f"timm:{TINY}, with the weights of old.safetensors"
    assert shown[0]["values"] == page_of(checkpoint)["fields"]["maps"][0]["values"]


def test_images_and_their_size_may_be_given(checkpoint, here):
    (here / "photos").mkdir()
    for index in range(3):
        Image.new("RGB", (80, 50), (40 * index, 100, 200)).save(f"photos/{index}.png")
    data = page_of(checkpoint, "--images", "photos", "--input-size", "3x96x96")
    assert "3 images of photos, 96x96 pixels" in data["fields"]["notes"][0]
    assert data["fields"]["maps"][0]["pixels"] == [96, 96]


def test_a_folder_that_states_a_huge_size_costs_no_more(checkpoint, here):
    shutil.copytree(checkpoint, "huge")
    edit_json(Path("huge") / CONFIG, lambda config: config["model_args"]["plan"].update(input_size=[3, 9999, 9999]))
    seal(Path("huge"))
    fields = page_of("huge")["fields"]
    assert fields["maps"] == []
    assert fields["notes"][-1].endswith(
        "images of more than 1,048,576 pixels are run where --input-size asks for them."
    )
    assert "gradient over" not in " ".join(fields["notes"])
    assert len(page_of("huge", "--input-size", "3x32x32")["fields"]["maps"]) > 0
    _, err = run("fold", "huge", code=2)
    assert "huge: its plan states images of 9999x9999 pixels; outputs are compared on 4,194,304 at most" in err


def test_a_record_of_training_is_drawn(checkpoint, history):
    data = page_of(checkpoint, "--history", history)["history"]
    assert data["steps"] == data["movingSteps"] == [0, 1, 2, 3]
    speed = {chart["title"]: chart["lines"] for chart in data["curves"]}["Speed"]
    assert [[line[0], line[1], round(line[2], 2), line[3]] for line in speed] == [[None, 0, 0.5, 0]] * len(
        data["names"]
    )
    for track in data["moving"]:
        (_, *_), (rows, before), (again, after), _ = track["frames"]
        assert rows == again
        assert all(math.isclose(b + 1, a, abs_tol=0.02) for b, a in zip(before, after, strict=True))


def test_an_old_record_without_single_elements_is_drawn_too(checkpoint, history, here):
    lines = [json.loads(line) for line in (here / history).read_text().splitlines()]
    for line in lines:
        for row in line["positions"]:
            del row["followed"]
    (here / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    track = page_of(checkpoint, "--history", "old.jsonl")["history"]["moving"][0]
    assert track["frames"] == [[]] * 4
    assert len(track["histograms"][0]) == 4


def test_a_model_of_the_users_own_is_built_with_trust_only(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "own_pictures_net.py").write_text(FACTORY)
    run("own_pictures_net:make", *CONVERT[1:], "--output", "net")
    data = page_of("net")
    assert data["fields"] is None
    assert "--trust-code" in data["kernelNotes"][1]
    trusted = page_of("net", "--trust-code")
    assert len(trusted["fields"]["maps"]) == 2
    assert trusted["kernels"] == data["kernels"]  # whose weights are not standardised
    _, message = run("inspect", "net", "--picture", "x.png", "--figure", "receptive-field", code=2)
    assert "--trust-code" in message


@pytest.mark.parametrize(
    ("figure", "suffix"), [*((figure, "svg") for figure in FigureName.__args__), ("cost", "png"), ("cost", "pdf")]
)
def test_every_figure_is_drawn_in_every_format(checkpoint, history, here, figure, suffix):
    more = ["--history", history] * (figure == "history")
    out, _ = run("inspect", checkpoint, "--picture", f"x.{suffix}", "--figure", figure, *more)
    assert f"Wrote x.{suffix}" in out
    assert (here / f"x.{suffix}").read_bytes().startswith(MAGIC[suffix])
    assert sorted(path.name for path in here.iterdir()) == ["positions.jsonl", f"x.{suffix}"]


@pytest.mark.parametrize("suffix", PICTURE_SUFFIXES)
@pytest.mark.parametrize("command", [("inspect", "net", "--figure", "cost"), ("sweep", TINY, "--sizes", "7..11")])
def test_a_picture_is_the_same_on_every_day(checkpoint, here, monkeypatch, command, suffix):
    (here / "net").symlink_to(checkpoint)
    for day in "01":
        monkeypatch.setenv("SOURCE_DATE_EPOCH", f"{day}00000")  # what matplotlib takes for the time
        run(*command, "--picture", f"{day}{suffix}")
    assert (here / f"0{suffix}").read_bytes() == (here / f"1{suffix}").read_bytes()


def test_json_stays_json(checkpoint, here):
    out, _ = run("inspect", checkpoint, "--json", "--html", "page.html")
    assert json.loads(out)["format"] == 1
    assert (here / "page.html").is_file()


REFUSED = {
    "--html page.html": "output page.html already exists; --force replaces it",
    "--html folder --force": "output folder is not a file",
    "--html page.html/x.html": "page.html is not a folder",
    "--picture x.gif": "--picture x.gif must end in .png, .svg, .pdf",
    "--picture x.png --figure pie": "pie",
    "--picture x.png --figure history": "--figure history needs --history",
    "--figure kernels": "--figure says what --picture draws",
    "--force": "--force replaces the file of --html or --picture",
    "--history positions.jsonl": "--history is for --html",
    "--picture x.png --images folder": "--images, --original and --input-size are for --html",
    "--html x.html --images nowhere": "images nowhere: there is no such folder",
    "--html x.html --images folder": "images folder: no files there end in",
    "--html x.html --original nowhere": "original nowhere: there is no such file",
    "--html x.html --history nowhere": "history nowhere: there is no such file",
    "--html x.html --history page.html": "page.html: line 1: a PositionTracker writes no such line",
    "--html x.html --history empty": "empty: has no records",
    "--html x.html --original page.html": "page.html",
    "--html x.png --picture x.png": "--html and --picture name the same file",
    "--html x.html --plan": "--plan prints the plan alone",
}


@pytest.mark.parametrize("options", REFUSED)
def test_mistakes_are_one_line_and_leave_nothing(checkpoint, here, options):
    (here / "page.html").write_text("mine\n")
    (here / "folder").mkdir()
    (here / "empty").touch()
    before = sorted(here.rglob("*"))
    out, message = run("inspect", checkpoint, *options.split(), code=2)
    assert out == ""
    assert REFUSED[options] in message
    assert message.splitlines()[-1].startswith("error: ")
    assert sorted(here.rglob("*")) == before
    assert (here / "page.html").read_text() == "mine\n"


@pytest.mark.parametrize("change", [{"width": 0.0}, {"width": 3.0}, {"counts": []}])
def test_a_record_with_impossible_bins_is_refused(checkpoint, history, here, change):
    line = json.loads((here / history).read_text().splitlines()[0])
    line["positions"][0]["histograms"][0].update(change)
    (here / "odd.jsonl").write_text(json.dumps(line) + "\n")
    _, message = run("inspect", checkpoint, "--html", "x.html", "--history", "odd.jsonl", code=2)
    assert "odd.jsonl: the histograms of step 0 have bins that are no part of a cell" in message


DAMAGES = {
    "a PositionTracker writes no such line: step": lambda line: line.update(step=2**70),
    "a PositionTracker writes no such line: positions.0.border_share": lambda line: first(line).update(
        border_share=1e308
    ),
    "a PositionTracker writes no such line: positions.0.speed": lambda line: first(line).update(speed=float("nan")),
    "a PositionTracker writes no such line: positions.0.spread.0": lambda line: first(line).update(spread=[1e308, 0.5]),
    "the records of steps 0 and 1 differ in tensors": lambda line: first(line)["histograms"].pop(),
    "the records follow several numbers of elements of": lambda line: first(line)["followed"].pop(),
}


def first(line):
    return line["positions"][0]


@pytest.mark.parametrize("message", DAMAGES)
def test_a_record_that_no_picture_can_show_is_refused(checkpoint, history, here, message):
    lines = [json.loads(line) for line in (here / history).read_text().splitlines()]
    DAMAGES[message](lines[1])
    (here / "odd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, said = run("inspect", checkpoint, "--html", "x.html", "--history", "odd.jsonl", code=2)
    assert message in said.splitlines()[-1]


def test_without_matplotlib_one_line_names_the_extra(checkpoint, here, monkeypatch):
    monkeypatch.setattr("dcls_convert.files.PLOT_LIBRARY", "no_such_library")
    _, message = run("inspect", checkpoint, "--picture", "x.png", code=2)
    assert "pip install 'dcls-convert[plot]'" in message
    run("inspect", checkpoint, "--html", "page.html")
