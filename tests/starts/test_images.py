"""Images of a calibration: how they are read, which are held out, and which are refused."""

import contextlib
import functools
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
from torchvision.transforms.functional import normalize, to_tensor

from dcls_convert import DclsConvertError, find_convs, plan_conversion, read_calibration_images

PHOTO = Image.linear_gradient("L").resize((40, 21)).convert("RGB")
SIZE = (3, 24, 32)


@pytest.fixture(scope="module")
def model_and_plan():
    """A model that states no normalisation, and its plan."""
    model = nn.Sequential(nn.Conv2d(3, 8, 7, padding=3), nn.Conv2d(8, 8, 7, padding=3, groups=8))
    return model, plan_conversion(find_convs(model, SIZE), dilated_size=9)


@pytest.fixture
def read(model_and_plan):
    """Calibrate on a folder; images have values from 0 to 1."""
    return functools.partial(read_calibration_images, *model_and_plan, mean=0, std=1)


def image_of_colour(size, colour):
    """Make an image of one colour, save for one pixel, since constant images are refused."""
    image = Image.new("RGB", size, colour)
    image.putpixel((size[0] // 2, size[1] // 2), (255, 255, 255))
    return image


def write_images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        image_of_colour((32, 24), (index, 90, 200)).save(folder / f"{index:03d}.png")


def shades(batches):
    """Return the first value of each image, which tells images of `write_images` apart."""
    return [float(image[0, 0, 0]) for batch in batches for image in batch]


@pytest.mark.parametrize(
    ("count", "held_out_indices"),
    [(1, []), (4, [1]), (23, [4, 9, 14, 19])],
)
def test_every_fifth_file_or_one_of_a_few_is_held_out_and_not_fitted_to(
    read, tmp_path, count, held_out_indices
):
    write_images(tmp_path, count)
    calibration = read(tmp_path)
    fitted = shades(calibration.batches)
    held_out = shades(calibration.held_out)
    all_shades = sorted({*fitted, *held_out})
    assert len(all_shades) == count
    assert len(fitted) == len(calibration) == count - len(held_out_indices)
    assert held_out == [all_shades[index] for index in held_out_indices]


@pytest.mark.parametrize(
    ("most_images", "fitted", "held_out"),
    # From 201 images on, at most every sixth is held out, since every fifth would exceed 40.
    [(None, 64, 16), (201, 168, 33)],
)
def test_images_are_read_from_every_subfolder_and_at_most_40_are_held_out(
    read, tmp_path, most_images, fitted, held_out
):
    for red, name in enumerate("abcde"):
        (tmp_path / name).mkdir()
        for index in range(48):
            image_of_colour((2, 2), (50 * red, 0, 0)).save(tmp_path / name / f"{index}.png")
    calibration = read(tmp_path, most_images=most_images)
    assert (len(calibration), len(shades(calibration.held_out))) == (fitted, held_out)
    assert len(set(shades(calibration.batches))) == len(set(shades(calibration.held_out))) == 5


@pytest.mark.parametrize("size", [(3, 96, 150), (1, 120, 60)])
@pytest.mark.parametrize("crop_mode", ["center", "border"])
def test_files_go_through_timms_evaluation_transform_for_the_model(tmp_path, size, crop_mode):
    config = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2), "crop_pct": 0.9}
    config |= {"crop_mode": crop_mode, "interpolation": "bilinear"}
    model = timm.create_model("test_convnext", in_chans=size[0], pretrained_cfg_overlay=config)
    plan = plan_conversion(find_convs(model, size))
    image = Image.effect_noise((300, 200), 90)
    image.save(tmp_path / "a.png")
    ((found,),) = read_calibration_images(model, plan, tmp_path).batches
    if size[0] == 3:
        image = image.convert("RGB")
    else:
        config |= {"mean": (0.5,), "std": (0.2,)}  # the averages
    transform = timm.data.create_transform(size, **config)
    torch.testing.assert_close(found, transform(image))


def test_a_folder_needs_a_normalisation_if_the_model_states_none(model_and_plan, tmp_path):
    """Images of the model's size are only normalised; torchvision's models need not state it."""
    image = PHOTO.resize((32, 24))
    image.save(tmp_path / "a.png")
    with pytest.raises(
        DclsConvertError, match="does not state how its images are normalised; give mean and std"
    ):
        read_calibration_images(*model_and_plan, tmp_path)
    mean = (0.5, 0.25, 0)
    (found,) = read_calibration_images(*model_and_plan, tmp_path, mean=mean, std=0.2).batches
    torch.testing.assert_close(found[0], normalize(to_tensor(image), mean, (0.2, 0.2, 0.2)))
    resnet = torchvision.models.resnet18()
    (found,) = read_calibration_images(
        resnet, plan_conversion(find_convs(resnet, SIZE)), tmp_path
    ).batches
    expected = normalize(to_tensor(image), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(found[0], expected)


# Files that are no images, or odd ones.


def test_hidden_files_and_other_files_are_skipped_and_broken_images_are_named(read, tmp_path):
    for folder in ("cats", "cats/.ipynb_checkpoints", ".hidden/dogs"):
        write_images(tmp_path / folder, 3)
    (tmp_path / "cats" / "000.png").rename(tmp_path / "cats" / "._000.png")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("no image either")
    os.mkfifo(tmp_path / "endless.png")
    notes = []
    calibration = read(tmp_path, note=notes.append)
    assert len(shades([*calibration.batches, *calibration.held_out])) == 2
    assert [note.partition(":")[0] for note in notes] == [f"skipped {tmp_path / 'broken.jpg'}"]


def test_no_file_is_run_as_a_program(read, tmp_path, monkeypatch):
    write_images(tmp_path / "images", 2)
    program = tmp_path / "images" / "program.png"
    program.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    ghostscript.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(ghostscript))
    notes = []
    assert len(read(tmp_path / "images", note=notes.append)) == 1
    assert [note.partition(":")[0] for note in notes] == [f"skipped {program}"]
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_read_or_noted_and_pillow_prints_nothing(read, tmp_path, monkeypatch):
    # Without handlers, as in the program, log records go to stderr.
    monkeypatch.setattr(logging.root, "handlers", [])
    exif_without_entries = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # states five, has none
    PHOTO.save(tmp_path / "exif.jpg", exif=exif_without_entries)
    PHOTO.convert("CMYK").save(tmp_path / "a_tiff.jpg", "TIFF")
    Image.new("1", (14_000, 14_000)).save(tmp_path / "bomb.png")  # a large image in a small file
    notes = []
    stderr = io.StringIO()
    with warnings.catch_warnings(action="error"), contextlib.redirect_stderr(stderr):
        images = read(tmp_path, held_out=(), note=notes.append)
    assert stderr.getvalue() == ""
    assert len(images) == 2
    assert [note.partition(":")[0] for note in notes] == [f"skipped {tmp_path / 'bomb.png'}"]


def test_grey_values_of_16_bits_are_scaled_and_those_of_32_refused(read, tmp_path):
    """The range of 32 bits is not known."""
    for name, mode, unit in [("a.png", "L", 1), ("b.png", "I;16", 257), ("c.tif", "F", 1)]:
        image = Image.new(mode, (SIZE[2], SIZE[1]), 64 * unit)
        image.paste(192 * unit, (0, 0, SIZE[2] // 2, SIZE[1]))
        image.save(tmp_path / name)
    notes = []
    ((with_8_bits, with_16_bits),) = read(tmp_path, held_out=(), note=notes.append).batches
    assert torch.equal(with_16_bits, with_8_bits)
    assert "32 bits" in notes[0]


# Tensors, and images that are given to compare on.


def test_a_batch_a_list_of_batches_and_single_images_give_the_same_images(model_and_plan):
    images = torch.rand(3, *SIZE)
    loader = [(images, torch.zeros(3))]
    for form in (images, [images], list(images), loader, [[image, 0] for image in images]):
        assert torch.equal(
            torch.cat(read_calibration_images(*model_and_plan, form).batches), images
        )
    assert len(read_calibration_images(*model_and_plan, images[0])) == 1


def test_every_fifth_image_of_tensors_is_held_out_and_none_is_lost(model_and_plan):
    sizes = (4, 2, 6)
    numbers = torch.arange(sum(sizes), dtype=torch.float32)
    images = numbers.view(-1, 1, 1, 1).repeat(1, *SIZE)
    images[..., -1] = -1
    calibration = read_calibration_images(*model_and_plan, images.split(sizes))
    assert shades(calibration.held_out) == numbers[4::5].tolist()
    assert sorted(shades((*calibration.batches, *calibration.held_out))) == numbers.tolist()


def test_held_out_images_may_be_given(model_and_plan, read, tmp_path):
    write_images(tmp_path, 6)
    others = torch.rand(2, *SIZE)
    from_folder = read(tmp_path, held_out=others)
    assert (len(from_folder), from_folder.files_held_out) == (6, 0)
    from_tensor = read_calibration_images(*model_and_plan, torch.rand(6, *SIZE), held_out=others)
    for calibration in (from_folder, from_tensor):
        assert torch.equal(torch.cat(calibration.held_out), others)
    assert not read(tmp_path, held_out=()).held_out
    with pytest.raises(DclsConvertError, match="a Calibration, which has its own"):
        read_calibration_images(*model_and_plan, from_folder, held_out=others)


def test_held_out_images_that_layers_are_fitted_to_are_refused(model_and_plan, read, tmp_path):
    write_images(tmp_path / "all", 6)
    write_images(tmp_path / "first", 2)
    with pytest.raises(DclsConvertError, match="held_out repeats 2 images"):
        read(tmp_path / "all", held_out=tmp_path / "first")
    images = torch.rand(6, *SIZE)
    with pytest.raises(DclsConvertError, match="held_out repeats 1 image that"):
        read_calibration_images(*model_and_plan, images[:4], held_out=images[3:])
    assert len(read_calibration_images(*model_and_plan, images[:3], held_out=images[3:])) == 3


# Images that are refused.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean": (0.5,)}, "give mean and std, or neither"),
        ({"mean": 0.5, "std": (0.2, 0, 0.2)}, "std 0.2,0,0.2 must be above 0"),
        ({"mean": 0.5, "std": 57.375}, "must be from 0 to 1, .* it is 0.225$"),
        ({"mean": 0.5, "std": "half"}, "give a number, or 3, one per channel"),
    ],
)
def test_a_normalisation_that_does_not_fit_is_refused(model_and_plan, tmp_path, options, says):
    write_images(tmp_path, 1)
    with pytest.raises(DclsConvertError, match=says):
        read_calibration_images(*model_and_plan, tmp_path, **options)
    with pytest.raises(DclsConvertError, match="not for tensors"):
        read_calibration_images(*model_and_plan, torch.rand(1, 3, 8, 8), **options)


FORM = "give float images (N, 3, rows, columns), normalised as the model takes them"


@pytest.mark.parametrize(
    ("images", "size", "says"),
    [
        ("file", SIZE, "is not a folder"),
        (".", SIZE, "there are no images"),
        (".", None, "state input_size"),
        ([torch.full((1, 3, 8, 8), float("nan"))], SIZE, "not finite"),
        ((torch.rand(9, *SIZE) - 123.675) / 58.395, SIZE, "the images are constant"),
        (8, SIZE, "found a value of type int; give float images"),
        (torch.zeros(5, 3, 8, 8, dtype=torch.uint8), SIZE, f"(5, 3, 8, 8), uint8; {FORM}"),
        ([torch.zeros(5, 8, 8, 3)], SIZE, f"(5, 8, 8, 3), float32; {FORM}"),
    ],
)
def test_images_that_cannot_be_used_are_refused(model_and_plan, tmp_path, images, size, says):
    model, plan = model_and_plan
    for name in ("file", "a.png"):
        (tmp_path / name).write_bytes(b"x")
    options = {}
    if isinstance(images, str):
        images = tmp_path / images
        options = {"mean": 0, "std": 1}
    with pytest.raises(DclsConvertError, match=re.escape(says)):
        read_calibration_images(model, replace(plan, input_size=size), images, **options)
