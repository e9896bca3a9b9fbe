"""Images of a calibration: which files are read, which are held out, and which are refused.

How files are read (`image_files.py`) is tested here, too: EXIF, 16 bits, formats, damage.
"""

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
from dcls_convert.starts.image_files import (
    IMAGENET,
    Normalisation,
    read_pixels,
    stated_normalisation,
)

from ..model_state import state_of
from ..several_inputs import EXAMPLES, IMAGE, TwoImages

FORMATS = ["JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF"]
PHOTO = Image.linear_gradient("L").resize((40, 21)).convert("RGB")
SAMPLES_PER_PIXEL = b"\x15\x01\x03\0\x01\0\0\0"  # a TIFF tag, without its value
SIZE = (3, 24, 32)


@pytest.fixture(scope="module")
def model_and_plan():
    model = timm.create_model("test_convnext")
    return model, plan_conversion(find_convs(model))


def image_of_colour(mode, size, colour):
    """Make an image of one colour, save for one pixel, since constant images are refused."""
    image = Image.new(mode, size, colour)
    image.putpixel((size[0] // 2, size[1] // 2), (255,) * len(image.getbands()))
    return image


def write_images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        image = image_of_colour("RGB", (50, 40), (index, 90, 200))
        image.save(folder / f"{index:03d}.png")


def shades(batches):
    """Return the first value of each image, which tells images of `write_images` apart."""
    return [float(image[0, 0, 0]) for batch in batches for image in batch]


@pytest.mark.parametrize(
    ("count", "held_out_indices"),
    [(1, []), (2, [1]), (4, [1]), (5, [4]), (23, [4, 9, 14, 19])],
)
def test_every_fifth_file_or_one_of_a_few_is_held_out_and_not_fitted_to(
    model_and_plan, tmp_path, count, held_out_indices
):
    write_images(tmp_path, count)
    calibration = calibrate(*model_and_plan, tmp_path)
    fitted = shades(calibration.batches)
    held_out = shades(calibration.held_out)
    all_shades = sorted({*fitted, *held_out})
    assert len(all_shades) == count
    assert len(fitted) == count - len(held_out_indices)
    assert held_out == [all_shades[index] for index in held_out_indices]


def test_hidden_files_and_folders_are_no_data(model_and_plan, tmp_path):
    write_images(tmp_path / "cats", 3)
    for folder in ("cats/.ipynb_checkpoints", ".hidden/dogs"):
        write_images(tmp_path / folder, 3)
    (tmp_path / "cats" / "000.png").rename(tmp_path / "cats" / "._000.png")
    calibration = calibrate(*model_and_plan, tmp_path)
    assert len({*shades(calibration.batches), *shades(calibration.held_out)}) == 2


def test_from_many_images_some_of_every_subfolder_are_read(model_and_plan, tmp_path):
    for red, name in enumerate("abcde"):
        (tmp_path / name).mkdir()
        for index in range(40):
            image = image_of_colour("RGB", (8, 8), (50 * red, 0, 0))
            image.save(tmp_path / name / f"{index}.png")
    calibration = calibrate(*model_and_plan, tmp_path)
    assert (len(calibration), len(shades(calibration.held_out))) == (64, 16)
    assert len(set(shades(calibration.batches))) == len(set(shades(calibration.held_out))) == 5


@pytest.mark.parametrize(
    ("most_images", "fitted", "held_out"),
    # From 201 images on, at most every sixth is held out, since every fifth would exceed 40.
    [(1, 1, 0), (60, 48, 12), (200, 160, 40), (205, 171, 34), (250, 215, 35)],
)
def test_most_images_limits_what_is_read_and_at_most_40_images_are_held_out(
    model_and_plan, tmp_path, most_images, fitted, held_out
):
    for index in range(250):
        image_of_colour("L", (2, 2), index).save(tmp_path / f"{index:03d}.png")
    calibration = calibrate(*model_and_plan, tmp_path, most_images=most_images)
    assert (len(calibration), len(shades(calibration.held_out))) == (fitted, held_out)


def test_images_of_a_folder_are_kept_in_8_bits_and_normalised_on_access(model_and_plan, tmp_path):
    write_images(tmp_path, 20)
    batches = calibrate(*model_and_plan, tmp_path, held_out=()).batches
    assert {pixels.dtype for pixels in batches.pixels} == {torch.uint8}
    assert [len(batch) for batch in batches] == [8, 8, 4]
    colour = torch.tensor([17, 90, 200], dtype=torch.float64) / 255
    stated = stated_normalisation(model_and_plan[0])
    expected = (colour - torch.tensor(stated.mean)) / torch.tensor(stated.std)
    torch.testing.assert_close(batches[2][1, :, 3, 4], expected.float())


def test_broken_images_are_named_and_the_model_is_unchanged(model_and_plan, tmp_path):
    write_images(tmp_path / "cats", 3)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image either")
    os.mkfifo(tmp_path / "endless.png")
    model, plan = model_and_plan
    before = state_of(model)
    notes = []
    calibration = calibrate(model, plan, tmp_path, note=notes.append)
    assert [note.partition(":")[0] for note in notes] == [f"skipped {tmp_path / 'broken.jpg'}"]
    assert {tuple(batch.shape[1:]) for batch in calibration.batches} == {plan.input_size}
    assert state_of(model) == before


def test_no_file_is_run_as_a_program(model_and_plan, tmp_path, monkeypatch):
    write_images(tmp_path / "images", 2)
    (tmp_path / "images" / "program.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    )
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(ghostscript))
    notes = []
    assert len(calibrate(*model_and_plan, tmp_path / "images", note=notes.append)) == 1
    assert [note.partition(":")[0] for note in notes] == [
        f"skipped {tmp_path / 'images' / 'program.png'}"
    ]
    assert not (tmp_path / "ran").exists()


def test_formats_are_recognised_by_content_whatever_the_suffix(model_and_plan, tmp_path):
    """ImageNet has a PNG, and images in CMYK, under names that end in .JPEG."""
    for image_format in FORMATS:
        mode = "CMYK" if image_format == "JPEG" else "RGB"
        PHOTO.convert(mode).save(tmp_path / f"{image_format}.JPEG", image_format)
    calibration = calibrate(*model_and_plan, tmp_path)
    assert len(calibration) + len(shades(calibration.held_out)) == len(FORMATS)


# Damaged files.


def encoded(image, image_format, **options):
    data = io.BytesIO()
    image.save(data, image_format, **options)
    return data.getvalue()


def test_damaged_files_are_read_or_noted_and_pillow_prints_nothing(tmp_path, monkeypatch):
    # Without handlers, as in the program, log records go to stderr.
    monkeypatch.setattr(logging.root, "handlers", [])
    chunks = encoded(Image.effect_noise((400, 400), 90), "PNG").rpartition(b"IDAT")
    tiff = encoded(PHOTO, "TIFF")
    assert tiff.count(SAMPLES_PER_PIXEL + b"\3\0") == 1
    exif_without_entries = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # states five, has none
    readable = {
        "exif.jpg": encoded(PHOTO, "JPEG", exif=exif_without_entries),
        "palette.png": encoded(PHOTO.quantize(16), "PNG", transparency=bytes(range(16))),
    }
    unreadable = {
        # A large image in a small file.
        "bomb.png": encoded(Image.new("1", (14_000, 14_000)), "PNG"),
        "chunk.png": chunks[0] + b"I\0AT" + chunks[2],
        "samples.tif": tiff.replace(SAMPLES_PER_PIXEL + b"\3\0", SAMPLES_PER_PIXEL + b"\3\4"),
    }
    for name, data in (readable | unreadable).items():
        (tmp_path / name).write_bytes(data)
    notes = []
    stderr = io.StringIO()
    with warnings.catch_warnings(action="error"), contextlib.redirect_stderr(stderr):
        images = read_pixels(tmp_path, SIZE, notes.append, max_images=80)
    assert stderr.getvalue() == ""
    assert [path.name for path in images] == [*readable]
    assert [note.partition(": ")[0].removeprefix("skipped ") for note in notes] == [
        str(tmp_path / name) for name in unreadable
    ]
    assert all(note.isprintable() for note in notes)


def grey_image(mode, low, high):
    """Make an image whose left half has the value `high`, and the rest `low`."""
    image = Image.new(mode, (SIZE[2], SIZE[1]), low)
    image.paste(high, (0, 0, SIZE[2] // 2, SIZE[1]))
    return image


@pytest.mark.parametrize(
    ("image_format", "mode"),
    [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B"), ("PPM", "I")],
)
def test_grey_values_of_16_bits_are_scaled(tmp_path, image_format, mode):
    (tmp_path / "a.png").write_bytes(encoded(grey_image("L", 64, 192), "PNG"))
    scaled = grey_image(mode, 64 * 257, 192 * 257)
    (tmp_path / "b.png").write_bytes(encoded(scaled, image_format))
    notes = []
    pixels_8_bit, pixels_16_bit = read_pixels(tmp_path, SIZE, notes.append, max_images=80).values()
    assert torch.equal(pixels_8_bit, pixels_16_bit)
    assert not notes


@pytest.mark.parametrize(("mode", "word"), [("I", "integers"), ("F", "floating-point")])
def test_pixels_of_32_bits_are_refused_since_their_range_is_unknown(tmp_path, mode, word):
    (tmp_path / "a.tif").write_bytes(encoded(grey_image(mode, 64, 192), "TIFF"))
    notes = []
    assert not read_pixels(tmp_path, SIZE, notes.append, max_images=80)
    assert word in notes[0]


def test_the_orientation_that_exif_states_is_applied(tmp_path):
    image = Image.effect_noise((60, 40), 90)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate by 90 degrees clockwise to show it
    (tmp_path / "a.png").write_bytes(encoded(image, "PNG", exif=exif))
    (tmp_path / "b.gif").write_bytes(encoded(image.rotate(-90, expand=True), "GIF"))
    with_exif, rotated = read_pixels(tmp_path, SIZE, print, max_images=80).values()
    assert torch.equal(with_exif, rotated)


def test_corner_crops_of_large_held_out_images_are_held_out_too(model_and_plan, tmp_path):
    _, rows, columns = model_and_plan[1].input_size
    sizes = [(9, 9), (2 * columns, 2 * rows), (9, 9), (2 * columns, 9)] * 5
    for index, (width, height) in enumerate(sizes):
        image = Image.new("RGB", (width, height))
        image.paste((255, 0, 0), (0, 0, width // 4, height // 4))
        image.save(tmp_path / f"{index:02d}.png")
    calibration = calibrate(*model_and_plan, tmp_path)
    held_out = torch.cat(list(calibration.held_out))
    assert len(held_out) == 4 + 4  # 04, 09, 14, 19, and four crops of 09, which is large
    assert calibration.images_cropped == 4
    redness = held_out[1:6, 0, :5, :5].mean((1, 2)).tolist()
    whole, top_left, bottom_left, top_right, _ = redness
    assert min(whole, top_left) > 0.5 > max(bottom_left, top_right)


def test_batches_of_a_loader_may_have_labels(model_and_plan):
    images = torch.rand(2, *model_and_plan[1].input_size)
    (batch,) = calibrate(*model_and_plan, [(images, torch.zeros(2))]).batches
    assert batch.data_ptr() == images.data_ptr()  # no copy


def test_a_batch_a_list_of_batches_and_single_images_give_the_same_images(model_and_plan):
    images = torch.rand(3, *model_and_plan[1].input_size)
    for form in (images, [images], list(images), [(image, 0) for image in images]):
        assert torch.equal(torch.cat(calibrate(*model_and_plan, form).batches), images)
    assert len(calibrate(*model_and_plan, images[0])) == 1


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (4, 2, 6), (3, 20)])
def test_every_fifth_image_of_tensors_is_held_out_and_none_is_lost(model_and_plan, sizes):
    numbers = torch.arange(sum(sizes), dtype=torch.float32)
    images = numbers.view(-1, 1, 1, 1).repeat(1, *model_and_plan[1].input_size)
    images[..., -1] = -1
    calibration = calibrate(*model_and_plan, images.split(sizes))
    assert shades(calibration.held_out) == numbers[4::5].tolist()
    assert sorted(shades((*calibration.batches, *calibration.held_out))) == numbers.tolist()


def test_held_out_images_may_be_given(model_and_plan, tmp_path):
    write_images(tmp_path, 6)
    others = torch.rand(2, *model_and_plan[1].input_size)
    for images in (tmp_path, torch.rand(6, *model_and_plan[1].input_size)):
        calibration = calibrate(*model_and_plan, images, held_out=others)
        assert len(calibration) == 6
        assert torch.equal(torch.cat(calibration.held_out), others)
        assert calibrate(*model_and_plan, images, held_out=()).held_out == ()
    assert len(torch.cat(list(calibrate(*model_and_plan, others, held_out=tmp_path).held_out))) == 6
    with pytest.raises(DclsConvertError, match="states what it holds out itself"):
        calibrate(*model_and_plan, calibration, held_out=others)


def own_model_and_plan():
    """Make a model that states no normalisation, and its plan."""
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
    ids=["timm", "timm, not ImageNet's", "torchvision", "own"],
)
def test_the_normalisation_is_what_the_model_states(make, expected):
    assert stated_normalisation(make()) == expected


def test_a_folder_needs_a_normalisation_if_the_model_states_none(tmp_path):
    write_images(tmp_path, 1)
    model, plan = own_model_and_plan()
    with pytest.raises(
        DclsConvertError, match="does not state how its images are normalised; give mean and std"
    ):
        calibrate(model, plan, tmp_path)
    calibration = calibrate(model, plan, tmp_path, mean=(0.5, 0.25, 0), std=0.2)
    red, green, _ = calibration.batches[0][0, :, 0, 0]
    assert red.item() == pytest.approx((0 / 255 - 0.5) / 0.2)
    assert green.item() == pytest.approx((90 / 255 - 0.25) / 0.2)
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
        (
            {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)},
            "mean 123.675,116.28,103.53 must be from 0 to 1, .* it is 0.485,0.456,0.406$",
        ),
        ({"mean": 0.5, "std": 57.375}, "std 57.375 must be from 0 to 1, .* it is 0.225$"),
        ({"mean": -0.5, "std": 0.5}, "mean -0.5 must be from 0 to 1"),
        ({"mean": float("nan"), "std": 0.5}, "mean nan must be from 0 to 1"),
        ({"mean": 0.5, "std": "half"}, "std 'half': give a number, or one per channel"),
    ],
)
def test_a_normalisation_that_does_not_fit_is_refused(model_and_plan, tmp_path, options, message):
    write_images(tmp_path, 1)
    with pytest.raises(DclsConvertError, match=message):
        calibrate(*model_and_plan, tmp_path, **options)
    with pytest.raises(DclsConvertError, match="not for tensors"):
        calibrate(*model_and_plan, torch.rand(1, 3, 8, 8), **options)


# Images that are refused.


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
        ([torch.zeros(1, 3, 8, 8)], SIZE, "the images are constant"),
        (torch.rand(9, 3, 1, 1).expand(9, *SIZE), SIZE, "the images are constant"),
        ((torch.rand(9, *SIZE) - 123.675) / 58.395, SIZE, "the images are constant"),
        (["a.png"], SIZE, "found a value of type str; give float images"),
        ({"image": torch.rand(SIZE)}, SIZE, "found a value of type dict; give float images"),
        (8, SIZE, "found a value of type int; give float images"),
    ],
)
def test_images_that_cannot_be_used_are_refused(model_and_plan, tmp_path, images, size, message):
    model, plan = model_and_plan
    for name in ("file", "a.png"):
        (tmp_path / name).write_bytes(b"x")
    if isinstance(images, str):
        images = tmp_path / images
    with pytest.raises(DclsConvertError, match=message):
        calibrate(model, replace(plan, input_size=size), images)


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
def test_a_tensor_of_the_wrong_shape_or_type_is_refused_with_the_right_one(
    model_and_plan, shape, dtype, size, expected
):
    model, plan = model_and_plan
    name = str(dtype).removeprefix("torch.")
    message = (
        f"calibration: found a tensor of {shape}, {name}; "
        f"give float images {expected}, normalised as the model takes them"
    )
    tensor = torch.zeros(shape, dtype=dtype)
    for images in (tensor, [tensor]):
        with pytest.raises(DclsConvertError, match=f"^{re.escape(message)}$"):
            calibrate(model, replace(plan, input_size=size), images)


def test_images_are_refused_for_a_network_of_several_inputs():
    images = torch.zeros(2, *IMAGE)
    with pytest.raises(DclsConvertError, match=r"and this one takes 1x3x16x16, 1x1x16x16"):
        convert_(TwoImages(), example_inputs=EXAMPLES[TwoImages], calibration=images)
