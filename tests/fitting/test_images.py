"""Images of a calibration: which files are taken, which are held out, and what is refused."""

import contextlib
import io
import logging
import os
import re
import warnings
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from PIL import EpsImagePlugin, Image
from torch import nn

from dcls_convert import DclsConvertError, calibrate, convert_, find_convs, plan_conversion
from dcls_convert.image_files import (
    IMAGENET,
    Normalisation,
    read_pixels,
    stated_normalisation,
)

from ..model_state import state_of

READ = ["JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF"]
PHOTO = Image.linear_gradient("L").resize((40, 21)).convert("RGB")
SAMPLES = b"\x15\x01\x03\0\x01\0\0\0"  # the TIFF tag of a number, samples per pixel
SIZE = (3, 24, 32)


@pytest.fixture(scope="module")
def planned():
    model = timm.create_model("test_convnext")
    return model, plan_conversion(find_convs(model))


def write_images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.new("RGB", (50, 40), (index, 90, 200)).save(folder / f"{index:03d}.png")


def shades(batches):
    """What tells the images of `write_images` apart, in their order."""
    return [float(image[0, 0, 0]) for batch in batches for image in batch]


@pytest.mark.parametrize(
    ("count", "held"), [(1, []), (2, [1]), (4, [1]), (5, [4]), (23, [4, 9, 14, 19])]
)
def test_every_fifth_image_or_one_of_a_few_is_held_out_and_none_is_in_both(
    planned, tmp_path, count, held
):
    write_images(tmp_path, count)
    calibration = calibrate(*planned, tmp_path)
    fitted = shades(calibration.batches)
    out = shades(calibration.held_out)
    every = sorted({*fitted, *out})
    assert (len(fitted), len(every)) == (count - len(held), count)
    assert out == [every[index] for index in held]


@pytest.mark.parametrize("noise", [True, False])
def test_images_like_noise_get_a_note(planned, noise):
    images = torch.randn(3, 3, 36, 36, generator=torch.Generator().manual_seed(0))
    if not noise:
        images = nn.functional.avg_pool2d(images, 5, stride=1)
    notes = []
    calibrate(*planned, images, note=notes.append)
    assert len(notes) == noise
    assert all("look like noise" in note for note in notes)


def test_of_many_images_some_of_every_folder_are_taken(planned, tmp_path):
    for red, name in enumerate("abcde"):
        (tmp_path / name).mkdir()
        for index in range(40):
            Image.new("RGB", (8, 8), (50 * red, 0, 0)).save(tmp_path / name / f"{index}.png")
    calibration = calibrate(*planned, tmp_path)
    assert (len(calibration), len(shades(calibration.held_out))) == (64, 16)
    assert len(set(shades(calibration.batches))) == len(set(shades(calibration.held_out))) == 5


@pytest.mark.parametrize(
    ("most", "fitted", "held_out"),
    # From 201 on, every sixth is held out, or fewer: every fifth would be more than 40.
    [(1, 1, 0), (60, 48, 12), (200, 160, 40), (205, 171, 34), (250, 215, 35)],
)
def test_as_many_images_as_asked_for_are_taken_and_at_most_40_held_out(
    planned, tmp_path, most, fitted, held_out
):
    for index in range(250):
        Image.new("L", (2, 2), index).save(tmp_path / f"{index:03d}.png")
    calibration = calibrate(*planned, tmp_path, most_images=most)
    assert (len(calibration), len(shades(calibration.held_out))) == (fitted, held_out)


def test_images_of_a_folder_are_kept_in_8_bits_and_normalised_when_they_are_asked_for(
    planned, tmp_path
):
    write_images(tmp_path, 20)
    batches = calibrate(*planned, tmp_path, held_out=()).batches
    assert {pixels.dtype for pixels in batches.pixels} == {torch.uint8}
    assert [len(batch) for batch in batches] == [8, 8, 4]
    colour = torch.tensor([17, 90, 200], dtype=torch.float64) / 255
    stated = stated_normalisation(planned[0])
    expected = (colour - torch.tensor(stated.mean)) / torch.tensor(stated.std)
    torch.testing.assert_close(batches[2][1, :, 3, 4], expected.float())


def test_files_that_are_no_images_are_named_and_the_model_is_left_alone(planned, tmp_path):
    write_images(tmp_path / "cats", 3)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image either")
    os.mkfifo(tmp_path / "endless.png")
    model, plan = planned
    before = state_of(model)
    notes = []
    calibration = calibrate(model, plan, tmp_path, note=notes.append)
    assert [note.partition(":")[0] for note in notes] == [f"skipped {tmp_path / 'broken.jpg'}"]
    assert {tuple(batch.shape[1:]) for batch in calibration.batches} == {plan.input_size}
    assert state_of(model) == before


def test_no_image_is_run_as_a_program(planned, tmp_path, monkeypatch):
    write_images(tmp_path / "images", 2)
    (tmp_path / "images" / "program.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    )
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(ghostscript))
    notes = []
    assert len(calibrate(*planned, tmp_path / "images", note=notes.append)) == 1
    assert [note.partition(":")[0] for note in notes] == [
        f"skipped {tmp_path / 'images' / 'program.png'}"
    ]
    assert not (tmp_path / "ran").exists()


def test_images_are_known_by_their_contents(planned, tmp_path):
    """ImageNet has a PNG, and images with four colours, under names that end in .JPEG."""
    for kind in READ:
        PHOTO.convert("CMYK" if kind == "JPEG" else "RGB").save(tmp_path / f"{kind}.JPEG", kind)
    calibration = calibrate(*planned, tmp_path)
    assert len(calibration) + len(shades(calibration.held_out)) == len(READ)


# Damaged files.


def saved(image, form, **options):
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def test_damaged_files_are_read_or_one_line_without_a_word_of_the_library(tmp_path, monkeypatch):
    # As in the program, where what is logged goes to stderr.
    monkeypatch.setattr(logging.root, "handlers", [])
    chunks = saved(Image.effect_noise((400, 400), 90), "PNG").rpartition(b"IDAT")
    tiff = saved(PHOTO, "TIFF")
    assert tiff.count(SAMPLES + b"\3\0") == 1
    taken = {
        "exif.jpg": saved(
            PHOTO, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0"
        ),  # five entries, none of them there
        "palette.png": saved(PHOTO.quantize(16), "PNG", transparency=bytes(range(16))),
    }
    others = {
        "bomb.png": saved(Image.new("1", (14_000, 14_000)), "PNG"),  # a small file of a large image
        "chunk.png": chunks[0] + b"I\0AT" + chunks[2],
        "samples.tif": tiff.replace(SAMPLES + b"\3\0", SAMPLES + b"\3\4"),
    }
    for name, data in (taken | others).items():
        (tmp_path / name).write_bytes(data)
    notes = []
    said = io.StringIO()
    with warnings.catch_warnings(action="error"), contextlib.redirect_stderr(said):
        images = read_pixels(tmp_path, SIZE, notes.append, max_images=80)
    assert said.getvalue() == ""
    assert [path.name for path in images] == [*taken]
    assert [note.partition(": ")[0].removeprefix("skipped ") for note in notes] == [
        str(tmp_path / name) for name in others
    ]
    assert all(note.isprintable() for note in notes)


def grey(mode, low, high):
    """Half dark, half bright."""
    image = Image.new(mode, (SIZE[2], SIZE[1]), low)
    image.paste(high, (0, 0, SIZE[2] // 2, SIZE[1]))
    return image


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B"), ("PPM", "I")]
)
def test_grey_values_of_16_bits_are_scaled(tmp_path, form, mode):
    (tmp_path / "a.png").write_bytes(saved(grey("L", 64, 192), "PNG"))
    (tmp_path / "b.png").write_bytes(saved(grey(mode, 64 * 257, 192 * 257), form))
    notes = []
    one, other = read_pixels(tmp_path, SIZE, notes.append, max_images=80).values()
    assert torch.equal(one, other)
    assert not notes


@pytest.mark.parametrize(("mode", "word"), [("I", "integers"), ("F", "floating-point")])
def test_pixels_of_32_bits_have_no_white_and_are_not_taken(tmp_path, mode, word):
    (tmp_path / "a.tif").write_bytes(saved(grey(mode, 64, 192), "TIFF"))
    notes = []
    assert not read_pixels(tmp_path, SIZE, notes.append, max_images=80)
    assert word in notes[0]


def test_an_image_is_turned_as_its_camera_was(tmp_path):
    turned = Image.effect_noise((60, 40), 90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter clockwise
    (tmp_path / "a.png").write_bytes(saved(turned, "PNG", exif=exif))
    (tmp_path / "b.gif").write_bytes(saved(turned.rotate(-90, expand=True), "GIF"))
    one, other = read_pixels(tmp_path, SIZE, print, max_images=80).values()
    assert torch.equal(one, other)


def test_of_what_is_held_out_the_corners_are_too_where_they_are_larger_than_the_input(
    planned, tmp_path
):
    _, rows, columns = planned[1].input_size
    for index, (width, height) in enumerate(
        [(9, 9), (2 * columns, 2 * rows), (9, 9), (2 * columns, 9)] * 5
    ):
        colour = Image.new("RGB", (width, height))
        colour.paste((255, 0, 0), (0, 0, width // 4, height // 4))
        colour.save(tmp_path / f"{index:02d}.png")
    calibration = calibrate(*planned, tmp_path)
    held = torch.cat(list(calibration.held_out))
    assert len(held) == 4 + 4  # 04, 09, 14, 19, of which 09 is large
    assert calibration.images_cropped == 4
    whole, top_left, bottom_left, top_right, _ = held[1:6, 0, :5, :5].mean((1, 2)).tolist()
    assert min(whole, top_left) > 0.5 > max(bottom_left, top_right)


def test_a_loader_may_give_labels_too(planned):
    images = torch.rand(2, *planned[1].input_size)
    (batch,) = calibrate(*planned, [(images, torch.zeros(2))]).batches
    assert batch.data_ptr() == images.data_ptr()  # no copy


def test_one_batch_and_images_are_taken_as_batches(planned):
    images = torch.rand(3, *planned[1].input_size)
    for given in (images, [images], list(images), [(image, 0) for image in images]):
        assert torch.equal(torch.cat(calibrate(*planned, given).batches), images)
    assert len(calibrate(*planned, images[0])) == 1


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (4, 2, 6), (3, 20)])
def test_of_given_images_every_fifth_is_held_out_and_none_is_lost(planned, sizes):
    numbers = torch.arange(sum(sizes), dtype=torch.float32)
    images = numbers.view(-1, 1, 1, 1).expand(-1, *planned[1].input_size)
    calibration = calibrate(*planned, images.split(sizes))
    assert shades(calibration.held_out) == numbers[4::5].tolist()
    assert sorted(shades((*calibration.batches, *calibration.held_out))) == numbers.tolist()


def test_images_to_hold_out_may_be_given(planned, tmp_path):
    write_images(tmp_path, 6)
    others = torch.rand(2, *planned[1].input_size)
    for images in (tmp_path, torch.rand(6, *planned[1].input_size)):
        calibration = calibrate(*planned, images, held_out=others)
        assert len(calibration) == 6
        assert torch.equal(torch.cat(calibration.held_out), others)
        assert calibrate(*planned, images, held_out=()).held_out == ()
    assert len(torch.cat(list(calibrate(*planned, others, held_out=tmp_path).held_out))) == 6
    with pytest.raises(DclsConvertError, match="states what it holds out itself"):
        calibrate(*planned, calibration, held_out=others)


def own_model():
    """Which states no normalisation."""
    model = nn.Sequential(nn.Conv2d(3, 8, 7, padding=3), nn.Conv2d(8, 8, 7, padding=3, groups=8))
    return model, plan_conversion(find_convs(model, (3, 8, 8)), dilated_size=9)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: timm.create_model("resnet10t"), IMAGENET),
        (lambda: timm.create_model("test_vit"), Normalisation(mean=(0.5,) * 3, std=(0.5,) * 3)),
        (torchvision.models.resnet18, IMAGENET),
        (nn.Identity, None),
    ],
    ids=["timm", "another of timm", "torchvision", "own"],
)
def test_the_normalisation_is_the_one_that_the_model_states(make, expected):
    assert stated_normalisation(make()) == expected


def test_a_folder_for_a_model_that_states_no_normalisation_needs_one(tmp_path):
    write_images(tmp_path, 1)
    model, plan = own_model()
    with pytest.raises(
        DclsConvertError, match="does not state how its images are normalised; give mean and std"
    ):
        calibrate(model, plan, tmp_path)
    (red, green, _) = calibrate(model, plan, tmp_path, mean=(0.5, 0.25, 0), std=(2.0,)).batches[0][
        0, :, 0, 0
    ]
    assert red.item() == pytest.approx((0 / 255 - 0.5) / 2)
    assert green.item() == pytest.approx((90 / 255 - 0.25) / 2)
    report = convert_(
        model, dilated_size=9, calibration=tmp_path, mean=(0.5,), std=(0.5,), input_size=(3, 8, 8)
    )
    assert report.layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "give mean and std, or neither"),
        ({"mean": (0.5, 0.5), "std": (1.0,)}, "mean 0.5,0.5 has 2 values; give 1, or 3"),
        ({"mean": (0.5,), "std": (0.0,)}, "std 0 must be above 0"),
    ],
)
def test_a_normalisation_that_does_not_fit_is_refused(planned, tmp_path, options, message):
    write_images(tmp_path, 1)
    with pytest.raises(DclsConvertError, match=message):
        calibrate(*planned, tmp_path, **options)
    with pytest.raises(DclsConvertError, match="tensors are taken as they are"):
        calibrate(*planned, torch.rand(1, 3, 8, 8), **options)


# Refused.


@pytest.mark.parametrize(
    ("images", "size", "message"),
    [
        ("none", SIZE, "there is no such folder"),
        ("file", SIZE, "is not a folder"),
        (".", SIZE, "there are no images"),
        (".", None, "state input_size"),
        (".", (4, 8, 8), "1 or 3 channels"),
        ([], SIZE, "there are no images"),
        ([torch.full((1, 3, 8, 8), float("nan"))], SIZE, "not finite"),
        (["a.png"], SIZE, "found a str; give float images"),
        (8, SIZE, "found a int; give float images"),
    ],
    ids=str,
)
def test_what_holds_no_images_is_refused(planned, tmp_path, images, size, message):
    model, plan = planned
    for name in ("file", "a.png"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DclsConvertError, match=message):
        calibrate(
            model,
            replace(plan, input_size=size),
            tmp_path / images if isinstance(images, str) else images,
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "expected"),
    [
        ((8,), torch.float32, SIZE, "(N, channels, rows, columns)"),
        ((5, 3, 8, 8), torch.uint8, SIZE, "(N, channels, rows, columns)"),
        ((5, 8, 8, 3), torch.float32, SIZE, "(N, 3, rows, columns)"),
        ((8, 8, 3), torch.float16, SIZE, "(N, 3, rows, columns)"),
        ((5, 8, 1), torch.float32, (1, 8), "(N, 1, *spatial)"),
    ],
)
def test_a_tensor_that_is_no_image_is_refused_with_the_shape_to_give(
    planned, shape, dtype, size, expected
):
    model, plan = planned
    name = str(dtype).removeprefix("torch.")
    message = (
        f"calibration: found a tensor of {shape}, {name}; "
        f"give float images {expected}, normalised as the model takes them"
    )
    tensor = torch.zeros(shape, dtype=dtype)
    for images in (tensor, [tensor]):
        with pytest.raises(DclsConvertError, match=f"^{re.escape(message)}$"):
            calibrate(model, replace(plan, input_size=size), images)
