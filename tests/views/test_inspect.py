"""`inspect --html` and `--picture`: as their user runs them, and what is refused in one line."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dcls_convert import load_converted, save_converted
from dcls_convert.checkpoints.folder import read_plan
from dcls_convert.files import PICTURE_SUFFIXES
from dcls_convert.networks.source import ModelSource, build_model
from dcls_convert.options import FigureName
from dcls_convert.tuning import PositionTracker

from ..command_line import run
from ..conftest import TINY
from .test_page import data_of

MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
CONVERT = [f"timm:{TINY}", "--dilated-size", "9", "--input-size", "3x32x32", "-q"]
FACTORY = "import timm\n\ndef make():\n    return timm.create_model('test_convnext', num_classes=3)\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "net"
    run(*CONVERT, "--output", folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fields_of(checkpoint, *options):
    run("inspect", checkpoint, "--html", "page.html", "--force", *options)
    with open("page.html", encoding="utf-8") as file:
        return data_of(file.read())["fields"]


def test_before_is_the_network_from_which_the_checkpoint_was_converted(checkpoint):
    fields = fields_of(checkpoint)
    assert [one["name"] for one in fields["maps"]] == ["Before", "After"]
    assert "random weights from which the checkpoint was converted" in fields["maps"][0]["what"]
    assert "4 images of seeded noise, 32x32 pixels" in fields["notes"][0]
    assert fields["maps"][0]["values"] != fields["maps"][1]["values"]

    model = load_converted(checkpoint)
    with torch.no_grad():
        model.stem[0].weight.mul_(1.5)
    save_converted(model, checkpoint, "tuned", fingerprint=False)
    changed = fields_of("tuned")
    assert [one["name"] for one in changed["maps"]] == ["After"]
    assert "--original FILE" in changed["notes"][1]
    save_file(build_model(ModelSource(name=f"timm:{TINY}"), seed=0).state_dict(), "old.safetensors")
    given = fields_of("tuned", "--original", "old.safetensors")["maps"]
    assert given[0]["what"] == f"timm:{TINY}, with the weights of old.safetensors"
    assert given[0]["values"] == fields["maps"][0]["values"]


def test_images_and_their_size_may_be_given(checkpoint, here):
    (here / "photos").mkdir()
    for index in range(3):
        Image.new("RGB", (80, 50), (40 * index, 100, 200)).save(f"photos/{index}.png")
    fields = fields_of(checkpoint, "--images", "photos", "--input-size", "3x48x48")
    assert "3 images of photos, 48x48 pixels" in fields["notes"][0]
    assert fields["maps"][0]["pixels"] == [48, 48]


def test_a_folder_that_states_a_huge_size_costs_no_more(checkpoint):
    plan = replace(read_plan(checkpoint), input_size=(3, 9999, 9999))
    save_converted(load_converted(checkpoint), plan, "huge", fingerprint=False)
    fields = fields_of("huge")
    assert fields["maps"] == []
    (note,) = fields["notes"]
    assert note.endswith("images of more than 1,048,576 pixels are run where --input-size asks for them.")
    assert len(fields_of("huge", "--input-size", "3x32x32")["maps"]) > 0
    _, err = run("fold", "huge", code=2)
    assert "huge: its plan states images of 9999x9999 pixels; outputs are compared on 4,194,304 at most" in err


def test_a_model_of_the_users_own_is_built_with_trust_only(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    (here / "own_pictures_net.py").write_text(FACTORY)
    run("own_pictures_net:make", *CONVERT[1:], "--output", "net")
    assert fields_of("net") is None
    data = data_of((here / "page.html").read_text(encoding="utf-8"))
    assert "--trust-code" in data["rawWeights"]
    assert len(fields_of("net", "--trust-code")["maps"]) == 2
    trusted = data_of((here / "page.html").read_text(encoding="utf-8"))
    assert trusted["kernels"] == data["kernels"]  # whose weights are not standardised
    _, message = run("inspect", "net", "--picture", "x.png", "--figure", "receptive-field", code=2)
    assert "--trust-code" in message


@pytest.mark.parametrize("figure", FigureName.__args__)
def test_every_figure_is_drawn(checkpoint, here, figure):
    PositionTracker(load_converted(checkpoint), "positions.jsonl").update(0)
    more = ["--history", "positions.jsonl"] * (figure == "history")
    out, _ = run("inspect", checkpoint, "--picture", "x.svg", "--figure", figure, *more)
    assert "Wrote x.svg" in out
    assert (here / "x.svg").read_bytes().startswith(MAGIC[".svg"])


@pytest.mark.parametrize("suffix", PICTURE_SUFFIXES)
def test_a_picture_is_the_same_on_every_day(checkpoint, here, monkeypatch, suffix):
    for day in "01":
        monkeypatch.setenv("SOURCE_DATE_EPOCH", f"{day}00000")  # what matplotlib takes for the time
        run("inspect", checkpoint, "--figure", "cost", "--picture", f"{day}{suffix}")
        if suffix == ".svg":
            run("sweep", TINY, "--sizes", "7..11", "--input-size", "3x32x32", "--picture", f"sweep{day}{suffix}")
    for first in here.glob("*0.*"):
        picture = first.read_bytes()
        assert picture.startswith(MAGIC[suffix])
        assert picture == first.with_name(first.name.replace("0", "1")).read_bytes()


def test_json_stays_json(checkpoint, here):
    out, _ = run("inspect", checkpoint, "--json", "--html", "page.html")
    assert json.loads(out)["format"] == 1
    assert (here / "page.html").is_file()


REFUSED = {
    "--html page.html": "output page.html already exists; --force replaces it",
    "--html folder --force": "output folder is not a file",
    "--picture x.gif": "--picture x.gif must end in .png, .svg, .pdf",
    "--picture x.png --figure history": "--figure history needs --history",
    "--figure kernels": "--figure says what --picture draws",
    "--force": "--force replaces the file of --html or --picture",
    "--history page.html": "--history is for --html, or --picture with --figure history",
    "--picture x.png --images folder": "--images, --original and --input-size are for --html",
    "--html x.html --images nowhere": "images nowhere: there is no such folder",
    "--html x.html --images folder": "images folder: no files there end in",
    "--html x.html --original nowhere": "original nowhere: there is no such file",
    "--html x.html --original page.html": "page.html",
    "--html x.html --history nowhere": "history nowhere: there is no such file",
    "--html x.html --history page.html": "page.html: line 1: a PositionTracker writes no such line",
    "--html x.png --picture x.png": "--html and --picture name the same file",
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


def test_without_matplotlib_one_line_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setattr("dcls_convert.files.PLOT_LIBRARY", "no_such_library")
    _, message = run("inspect", checkpoint, "--picture", "x.png", code=2)
    assert "pip install 'dcls-convert[plot]'" in message
    run("inspect", checkpoint, "--html", "page.html")
