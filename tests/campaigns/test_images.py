"""Photographs as a calibration meets them: of every format and mode, cut, changed, with metadata that says nothing."""

import contextlib
import functools
import io
import logging
import warnings

import pytest
import torch
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image
from torch import nn

from dcls_convert.files import SUFFIXES
from dcls_convert.fitting.images import read_images

from .campaign import Finding, check_line

MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "LAB", "HSV"]
READ = ["JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF"]
OTHERS = ["ICO", "TGA", "PCX", "SGI", "JPEG2000", "EPS", "PDF"]
WORDS = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\1", b"\x80\0\0\0"]
METADATA = b"Exif\0\0II*\0\x08\0\0\0"
SIZE = (3, 24, 32)

pytestmark = pytest.mark.campaign


@functools.cache
def photo(mode, side):
    image = Image.linear_gradient("L").resize((side, side // 2 + 1)).convert("RGB")
    return image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)


@functools.cache
def bomb(mode, side):
    """A small file of a large image."""
    data = io.BytesIO()
    Image.new(mode, (side, side)).save(data, "PNG")
    return data.getvalue()


@st.composite
def files(draw):
    """The name's end, and the bytes."""
    side, mode = draw(st.sampled_from([1, 7, 40, 40, 200])), draw(st.sampled_from(MODES))
    kind, data = draw(st.sampled_from([*READ * 3, *OTHERS])), io.BytesIO()
    more = {"exif": METADATA + draw(st.binary(max_size=40))} if draw(st.booleans()) else {}
    with contextlib.suppress(OSError, ValueError, KeyError), warnings.catch_warnings(action="ignore"):
        photo(mode, side).save(data, kind, **more)
    data = bytearray(data.getvalue())
    for _ in range(draw(st.sampled_from([0, 1, 1, 4, 20]))):
        near = draw(st.sampled_from([30, 300, 10**6]))  # of the start, where the headers are
        place = draw(st.integers(0, 2**32)) % max(1, min(len(data), near))  # evenly
        match draw(st.sampled_from(["byte", "byte", "word", "cut", "again"])):
            case "byte":
                data[place : place + 1] = bytes([draw(st.integers(0, 255))])
            case "word":
                data[place : place + 4] = draw(st.sampled_from(WORDS))
            case "cut":
                del data[max(place, 1) :]
            case "again":
                data[place:place] = data[place : place + draw(st.integers(0, 50))]
    return draw(st.sampled_from(SUFFIXES)), bytes(data)


def test_images(campaign, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # as in the program, where what is logged goes to stderr
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")  # as where Ghostscript is installed
    Image.init()

    def check(given):
        suffix, data = given
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / f"photo{suffix}").write_bytes(data)
        notes, said = [], io.StringIO()
        with warnings.catch_warnings(record=True, action="always") as warned:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                images = read_images(tmp_path, nn.Identity(), SIZE, notes.append)
        if warned or said.getvalue():
            raise Finding(f"Pillow says: {said.getvalue()}{[str(warning.message) for warning in warned]}")
        if len(images) + len(notes) != 1:
            raise Finding(f"{len(images)} images and {notes}")
        for line in notes:
            check_line(line)
        for image in images:
            if image.shape != SIZE or image.dtype != torch.float32 or not image.isfinite().all():
                raise Finding(f"an image of shape {tuple(image.shape)} with {image.dtype}")
        return bool(images)

    bombs = st.sampled_from([("1", 13_000), ("RGBA", 13_000), ("1", 14_000)]).map(lambda each: (".png", bomb(*each)))
    most = st.integers(0, 2**32).map(lambda number: number % 1000 != 7)  # evenly; hypothesis likes borders
    campaign.run(most.flatmap(lambda each: files() if each else bombs), check, folder=tmp_path)
