"""`convert --html`: a page and a picture in the folder, which stays a checkpoint like any other."""

import pytest

from dcls_convert.checkpoints.folder import CARD, FILES, PAGE, PICTURE
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder
from dcls_convert.views import files

from ..command_line import run
from ..conftest import TINY
from .test_page import data_of

CONVERT = [f"timm:{TINY}", "--dilated-size", "9", "--input-size", "3x32x32", "--html"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folder_holds_the_page_and_its_card_the_picture_until_it_is_replaced(here):
    run(*CONVERT, "--output", "net")
    folder = here / "net"
    assert names(folder) == {*FILES, PAGE, PICTURE}
    data = data_of((folder / PAGE).read_text(encoding="utf-8"))
    assert (data["title"], data["fields"]) == ("net", None)
    assert all(shown["heat"] for shown in data["positions"])
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE})" in (folder / CARD).read_text(encoding="utf-8")
    verification = verify_folder(folder, rebuild=rebuild_here)
    assert verification.ok
    assert "other files" not in [check.name for check in verification.checks]
    run(*CONVERT[:-1], "--output", "net", "-q", "--force")
    assert names(folder) == set(FILES)
    assert PICTURE not in (folder / CARD).read_text(encoding="utf-8")


def test_where_a_picture_fails_nothing_is_written(here, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "page", fail)
    run(*CONVERT, "--output", "net", code=2)
    assert list(here.iterdir()) == []


def test_without_matplotlib_the_page_is_there_and_a_note_says_why_the_picture_is_not(here, monkeypatch):
    monkeypatch.setattr("dcls_convert.files.PLOT_LIBRARY", "no_such_library")
    _, message = run(*CONVERT, "--output", "net")
    assert names(here / "net") == {*FILES, PAGE}
    assert "pip install 'dcls-convert[plot]'" in message
    assert PICTURE not in (here / "net" / CARD).read_text(encoding="utf-8")


def test_a_dry_run_has_no_page():
    _, message = run(*CONVERT, "--dry-run", code=2)
    assert "--html has no effect with --dry-run" in message
