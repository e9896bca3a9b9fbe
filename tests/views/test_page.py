"""The page: one file that needs nothing else, bounded in size, safe whatever the names in it."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from dcls_convert.views.page import TEMPLATE, page
from dcls_convert.views.pictures import FieldPictures
from dcls_convert.views.receptive_field import field_picture

from ..checkpoints.folders import convert
from .test_figures import CASES, pictures_of

HOSTILE = "</script><b onclick=alert(1)>&\x1b[31m\u202e\u2028"


class Page(HTMLParser):
    """Tags, attributes and scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts.append(data)


def data_of(text):
    return json.loads(Page(text).scripts[0])


def tags_of(text):
    return [tag for tag, _ in Page(text).tags]


@pytest.fixture(scope="module")
def converted():
    return convert()


@pytest.mark.parametrize("name", CASES)
def test_a_page_refers_to_nothing_outside(name):
    text = page(pictures_of(*CASES[name]()))
    assert text.isascii()
    assert not re.search(r"https?:|//\w+\.|url\(|@import|\bimport\(|fetch\(|XMLHttp", text)
    for _, attributes in Page(text).tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onclick"}
    policies = [tag.get("content", "") for _, tag in Page(text).tags if "http-equiv" in tag]
    assert policies[0].startswith("default-src 'none';")


def test_the_data_is_that_of_the_pictures(converted):
    pictures = pictures_of(*converted)
    data = data_of(page(pictures))
    for shown, picture in zip(data["positions"], pictures.positions, strict=True):
        assert sum(shown["heat"]) == picture.row.elements
        assert shown["histograms"] == [list(counts) for counts in picture.histograms]
    for shown, layer in zip(data["kernels"], pictures.kernels, strict=True):
        cells = torch.tensor([[c for row in kernel.cells for c in row] for kernel in layer.kernels])
        packed = torch.frombuffer(bytearray(base64.b64decode(shown["cells"])), dtype=torch.int8)
        again = packed.reshape(cells.shape) / 127 * cells.abs().amax(1, keepdim=True)
        torch.testing.assert_close(again, cells, rtol=0, atol=float(cells.abs().max()) / 254 * 1.01)
        places = torch.frombuffer(bytearray(base64.b64decode(shown["places"])), dtype=torch.int16) / 100
        wanted = torch.tensor([kernel.elements for kernel in layer.kernels])[..., :2]
        torch.testing.assert_close(places.reshape(wanted.shape), wanted, rtol=0, atol=0.00501)


def test_hostile_names_stay_text(converted):
    pictures = pictures_of(*converted)
    row = replace(pictures.positions[0].row, name=HOSTILE)
    fields = FieldPictures(
        fields=(field_picture(torch.ones(4, 4), HOSTILE, HOSTILE),), layer=HOSTILE, images=HOSTILE, notes=(HOSTILE,)
    )
    text = page(
        replace(
            pictures,
            name=HOSTILE,
            positions=(replace(pictures.positions[0], row=row),),
            kernels=(replace(pictures.kernels[0], name=HOSTILE),),
            raw_weights=HOSTILE,
            report=replace(pictures.report, model=HOSTILE),
            fields=fields,
        )
    )
    assert tags_of(text) == tags_of(page(pictures))
    assert "</script><b" not in text
    assert text.isascii()
    found = strings(data_of(text))
    assert sum("</script><b onclick=alert(1)>&" in string for string in found) >= 8
    assert {c for string in found for c in string if not c.isprintable()} <= {"\u00a0"}


def strings(data):
    if isinstance(data, str):
        return [data]
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [string for part in parts for string in strings(part)]


@pytest.mark.parametrize(("size", "tie"), [(9, "none"), (101, "stage")])
def test_a_wide_model_has_a_small_page(size, tie):
    model, plan = convert("timm:mobilenetv3_small_100", size, tie=tie)
    assert len(page(pictures_of(model, plan))) < 3e6


def test_the_template_has_one_place_for_data():
    assert TEMPLATE.read_text(encoding="utf-8").count("/* data */") == 1
