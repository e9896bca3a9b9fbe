"""The page is one file that needs nothing else, is bounded in size, and is safe with any names."""

import base64
import json
import re
from dataclasses import replace

import pytest
import torch

from dcls_convert.views.page import page
from dcls_convert.views.receptive_field import ReceptiveFieldMaps, receptive_field_map

from ..checkpoints.folders import convert
from .parsed_page import Page, page_data
from .test_figures import CASES, model_and_plan, pictures_of

HOSTILE = "</script><b onclick=alert(1)>&\x1b[31m\u202e\u2028"


@pytest.fixture
def converted():
    return model_and_plan("tied")


@pytest.mark.parametrize("name", CASES)
def test_a_page_refers_to_nothing_outside(name):
    text = page(pictures_of(*model_and_plan(name)))
    assert text.isascii()
    assert not re.search(r"https?:|//\w+\.|url\(|@import|\bimport\(|fetch\(|XMLHttp", text)
    for _, attributes in Page(text).tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onclick"}
    policies = [tag.get("content", "") for _, tag in Page(text).tags if "http-equiv" in tag]
    assert policies[0].startswith("default-src 'none';")


def test_the_page_has_the_data_of_the_pictures(converted):
    pictures = pictures_of(*converted)
    data = page_data(page(pictures))
    for shown, picture in zip(data["positions"], pictures.positions, strict=True):
        assert shown["heat"] == picture.heat.tolist()
        assert shown["histograms"] == [list(counts) for counts in picture.histograms]
    for shown, layer in zip(data["kernels"], pictures.kernels, strict=True):
        largest = layer.cells.abs().amax((1, 2), keepdim=True)
        shares = unpacked(shown["cells"], torch.int8) / data["factors"]["int8Max"]
        cells = shares.reshape(layer.cells.shape) * largest
        rounding = float(largest.max()) / 254 * 1.01
        torch.testing.assert_close(cells, layer.cells, rtol=0, atol=rounding)
        coordinates = unpacked(shown["positions"], torch.int16) / data["factors"]["unitsPerCell"]
        positions = coordinates.reshape(layer.positions.shape)
        torch.testing.assert_close(positions, layer.positions, rtol=0, atol=0.00501)


def unpacked(text, dtype):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def test_hostile_names_stay_text(converted):
    pictures = pictures_of(*converted)
    row = replace(pictures.positions[0].row, name=HOSTILE)
    fields = ReceptiveFieldMaps(
        maps=(receptive_field_map(torch.ones(4, 4), HOSTILE, HOSTILE),), notes=(HOSTILE,)
    )
    positions = (replace(pictures.positions[0], row=row),)
    kernels = (replace(pictures.kernels[0], name=HOSTILE),)
    hostile = replace(
        pictures,
        name=HOSTILE,
        positions=positions,
        kernels=kernels,
        why_not_rebuilt=HOSTILE,
        receptive_fields=fields,
    )
    text = page(replace(hostile, report=replace(pictures.report, model=HOSTILE)))
    assert Page(text).tags == Page(page(pictures)).tags
    assert "</script><b" not in text
    assert text.isascii()
    strings = json.dumps(page_data(text), ensure_ascii=False)
    assert strings.count("</script><b onclick=alert(1)>&") >= 8
    assert strings.replace("\u00a0", "").isprintable()
    assert "\\u00" not in strings


@pytest.mark.parametrize(("size", "tie"), [(9, "none"), (101, "stage")])
def test_a_wide_model_has_a_small_page(size, tie):
    assert len(page(pictures_of(*convert("timm:mobilenetv3_small_100", size, tie=tie)))) < 3e6
