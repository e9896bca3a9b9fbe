"""Images of a calibration: which files are taken, which are held out, and what is refused."""

import logging
import os
import warnings
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image

from dcls_convert import DclsConvertError, calibrate, find_convs, plan_conversion

from ..test_pipeline import assert_unchanged, snapshot


@pytest.fixture(scope="module")
def planned():
    model = timm.create_model("test_convnext")
    return model, plan_conversion(find_convs(model))


def write_images(folder, count, **shape):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.new("RGB", shape.get("size", (50, 40)), (index, 90, 200)).save(folder / f"{index:03d}.png")


def shades(batches):
    """What tells the images of `write_images` apart, in their order."""
    return [float(image[0, 0, 0]) for batch in batches for image in batch]


def test_every_fifth_image_is_held_out_and_none_is_in_both(planned, tmp_path):
    write_images(tmp_path, 23)
    found = calibrate(*planned, tmp_path)
    fitted, held = shades(found.batches), shades(found.held_out)
    every = sorted({*fitted, *held})
    assert (len(fitted), len(held), len(every)) == (19, 4, 23)
    assert held == every[4::5]


def test_of_many_images_some_of_every_folder_are_taken(planned, tmp_path):
    for red, name in enumerate("abcde"):
        for index in range(40):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (50 * red, 0, 0)).save(tmp_path / name / f"{index}.png")
    found = calibrate(*planned, tmp_path)
    assert (len(found), len(shades(found.held_out))) == (64, 16)
    assert len(set(shades(found.batches))) == len(set(shades(found.held_out))) == 5


@pytest.mark.parametrize(("count", "held"), [(1, 0), (2, 1), (4, 1), (5, 1)])
def test_of_few_images_one_is_held_out_if_others_are_left(planned, tmp_path, count, held):
    write_images(tmp_path, count)
    found = calibrate(*planned, tmp_path)
    assert (len(found), len(shades(found.held_out))) == (count - held, held)


def test_files_that_are_no_images_are_named_and_the_model_is_left_alone(planned, tmp_path):
    write_images(tmp_path / "cats", 3)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image either")
    os.mkfifo(tmp_path / "endless.png")
    model, plan = planned
    before, notes = snapshot(model), []
    found = calibrate(model, plan, tmp_path, note=notes.append)
    assert [note.partition(":")[0] for note in notes] == [f"{tmp_path / 'broken.jpg'} is not an image"]
    assert {tuple(batch.shape[1:]) for batch in found.batches} == {plan.input_size}
    assert_unchanged(model, before)


@pytest.mark.skipif(os.name == "nt", reason="a program is a script with a first line that names its interpreter")
def test_no_image_is_run_as_a_program(planned, tmp_path, monkeypatch):
    write_images(tmp_path / "images", 2)
    postscript = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "images" / "program.png").write_text(postscript)
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked up on PATH
    notes = []
    assert len(calibrate(*planned, tmp_path / "images", note=notes.append)) == 1
    assert [note.partition(":")[0] for note in notes] == [f"{tmp_path / 'images' / 'program.png'} is not an image"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF"])
def test_images_are_known_by_their_contents(planned, tmp_path, kind):
    """ImageNet has a PNG, and images with four colours, under names that end in .JPEG."""
    Image.linear_gradient("L").convert("CMYK" if kind == "JPEG" else "RGB").save(tmp_path / "photo.JPEG", kind)
    assert len(calibrate(*planned, tmp_path)) == 1


CUT_EXIF = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # five entries, of which none is there
SAMPLES = b"\x15\x01\x03\0\x01\0\0\0"  # the TIFF tag of a number, samples per pixel


def test_photographs_with_damaged_metadata_are_read_without_a_word_of_the_library(
    planned, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(logging.root, "handlers", [])  # as in the program, where what is logged goes to stderr
    photo = Image.linear_gradient("L").convert("RGB")
    photo.save(tmp_path / "cut.jpg", exif=CUT_EXIF)
    photo.quantize(16).save(tmp_path / "palette.png", transparency=bytes(range(16)))
    photo.save(tmp_path / "many.tif")
    tiff = (tmp_path / "many.tif").read_bytes()
    assert tiff.count(SAMPLES + b"\3\0") == 1
    (tmp_path / "many.tif").write_bytes(tiff.replace(SAMPLES + b"\3\0", SAMPLES + b"\3\4"))
    notes = []
    with warnings.catch_warnings(action="error"):
        found = calibrate(*planned, tmp_path, note=notes.append)
    assert len(found) + len(shades(found.held_out)) == 2
    assert [note.partition(":")[0] for note in notes] == [f"{tmp_path / 'many.tif'} is not an image"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none", "there is no such folder"),
        (lambda folder: (folder / "file", (folder / "file").touch())[0], "is not a folder"),
        (lambda folder: folder, "no files there end in .jpg"),
        (lambda folder: (folder, (folder / "a.png").write_bytes(b"x"))[0], "there are no images"),
        (lambda _: [], "there are no images"),
        (lambda _: [torch.full((1, 3, 8, 8), float("nan"))], "not finite"),
    ],
)
def test_what_holds_no_images_is_refused(planned, tmp_path, make, message):
    with pytest.raises(DclsConvertError, match=message):
        calibrate(*planned, make(tmp_path))


def test_a_folder_is_of_no_use_without_a_size_of_images(planned, tmp_path):
    write_images(tmp_path, 2)
    model, plan = planned
    for size, message in {None: "state input_size", (4, 8, 8): "1 or 3 channels; the model takes .4, 8, 8."}.items():
        with pytest.raises(DclsConvertError, match=message):
            calibrate(model, replace(plan, input_size=size), tmp_path)
