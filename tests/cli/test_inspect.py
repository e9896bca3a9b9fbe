"""`--picture` of `inspect` and `convert` as a user runs them, and refusals in one line."""

import pytest

from dcls_convert import load_converted
from dcls_convert.checkpoints.folder import CARD, FILES, PICTURE
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.tuning import PositionTracker

from ..command_line import run

NETWORK = "timm:test_efficientnet"
OPTIONS = ["--dilated-size", "7", "--input-size", "3x32x32", "-q"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "net"
    run(NETWORK, *OPTIONS, "--output", folder)
    return folder


def names(folder):
    return {path.name for path in folder.iterdir()}


REFUSED = {
    "--picture mine.png": "output mine.png already exists; name another",
    "--picture x.gif": "--picture x.gif must end in .png, .svg, .pdf",
    "--picture x.png --plan": "--plan prints the plan alone; omit --since, --history",
    "--history mine.png": "--history and --width need a file to draw: add --picture FILE.png",
    "--width 4": "--history and --width need a file to draw: add --picture FILE.png",
    "--picture x.png --width 2": "Invalid value for '--width'",
    "--picture x.png --history mine.png": "mine.png: line 1 is not a record of a PositionTracker",
}


@pytest.mark.parametrize("options", REFUSED)
def test_mistakes_are_one_line_and_leave_nothing(checkpoint, tmp_path, options):
    (tmp_path / "mine.png").write_text("mine\n")
    out, err = run("inspect", checkpoint, *options.split(), code=2)
    assert out == ""
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[options]}")
    assert names(tmp_path) == {"mine.png"}
    assert (tmp_path / "mine.png").read_text() == "mine\n"


def test_without_matplotlib_one_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("dcls_convert.output.FIGURE_LIBRARY", "no_such_library")
    line = "error: --picture needs no_such_library: pip install no_such_library\n"
    assert run(NETWORK, *OPTIONS, "--picture", "--output", "net", code=2) == ("", line)
    assert names(tmp_path) == set()


def test_a_picture_shows_the_record_of_a_training_and_needs_no_model(
    checkpoint, tmp_path, monkeypatch
):
    for run_name in ("one", "two"):
        tracker = PositionTracker(load_converted(checkpoint), f"{run_name}.jsonl", unit="epoch")
        for epoch in range(3):
            tracker.update(epoch)
    monkeypatch.setattr("timm.create_model", None)
    run("inspect", checkpoint, "--picture", "without.svg")
    options = "--picture with.svg --width 3.3 --history one.jsonl --history two.jsonl --quiet"
    assert run("inspect", checkpoint, *options.split()) == ("with.svg\n", "")
    assert "<!-- epoch -->" not in (tmp_path / "without.svg").read_text()
    drawn = (tmp_path / "with.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("epoch", "one", "two"))


def test_a_folder_and_its_card_have_the_picture_until_it_is_replaced(tmp_path):
    run(NETWORK, *OPTIONS, "--picture", "--output", "net")
    folder = tmp_path / "net"
    assert names(folder) == {*FILES, PICTURE}
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE})" in (folder / CARD).read_text(encoding="utf-8")
    assert verify_folder(folder).ok
    run(NETWORK, *OPTIONS, "--output", "net", "--force")
    assert names(folder) == set(FILES)
    assert PICTURE not in (folder / CARD).read_text(encoding="utf-8")
