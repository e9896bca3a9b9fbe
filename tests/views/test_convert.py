"""`convert --html`: a page and a picture in the folder, which stays a checkpoint like any other."""

import pytest

from dcls_convert.checkpoints.folder import CARD, FILES, PAGE, PICTURE
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.views import files

from ..command_line import run
from ..conftest import TINY
from .test_page import data_of

CONVERT = [f"timm:{TINY}", "--dilated-size", "9", "--input-size", "3x64x64", "--output", "net"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folder_holds_the_page_and_its_card_the_picture(here):
    run(*CONVERT, "--html")
    folder = here / "net"
    assert names(folder) == {*FILES, PAGE, PICTURE}
    data = data_of((folder / PAGE).read_text(encoding="utf-8"))
    assert data["title"] == "net"
    assert data["fields"] is None
    assert sum(map(sum, [shown["heat"] for shown in data["positions"]])) > 0
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE})" in (folder / CARD).read_text(encoding="utf-8")
    found = verify_folder(folder, rebuild=rebuild_here)
    assert found.ok
    assert "other files" not in [check.name for check in found.checks]


def test_a_folder_with_pictures_is_replaced_whole(here):
    run(*CONVERT, "--html", "-q")
    run(*CONVERT, "-q", code=2)
    run(*CONVERT, "-q", "--force")
    assert names(here / "net") == set(FILES)
    assert PICTURE not in (here / "net" / CARD).read_text(encoding="utf-8")


def test_where_a_picture_fails_nothing_is_written(here, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "page", fail)
    run(*CONVERT, "--html", code=2)
    assert list(here.iterdir()) == []


def test_without_matplotlib_the_page_is_there_and_a_note_says_why_the_picture_is_not(here, monkeypatch):
    monkeypatch.setattr("dcls_convert.files.PLOT_LIBRARY", "no_such_library")
    _, message = run(*CONVERT, "--html")
    assert names(here / "net") == {*FILES, PAGE}
    assert "pip install 'dcls-convert[plot]'" in message
    assert PICTURE not in (here / "net" / CARD).read_text(encoding="utf-8")


def test_a_dry_run_has_no_page():
    _, message = run(*CONVERT[:-2], "--html", "--dry-run", code=2)
    assert "--html has no effect with --dry-run" in message
