"""The page needs nothing outside, shows the data, is bounded in size and safe with any names."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("plotly")

from plotly.offline import get_plotlyjs

from dcls_convert.views.history import HistoryPicture, TrackPicture
from dcls_convert.views.page import kernels_figure, page

from ..checkpoints.folders import convert
from .test_figures import CASES, model_and_plan, pictures_of

HOSTILE = "</script><b onclick=alert(1)>&\x1b[31m\u202e\u2028"


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def own_part(text):
    """Return a page without plotly's own script."""
    assert get_plotlyjs() in text
    return text.replace(get_plotlyjs(), "")


def shape_of(tags):
    """Return the tags with the names of their attributes; plotly gives figures random names."""
    return [(tag, sorted(attributes)) for tag, attributes in tags]


@pytest.mark.parametrize("name", CASES)
def test_a_page_refers_to_nothing_outside(name):
    text = own_part(page(pictures_of(*model_and_plan(name))))
    tags = Tags(text).tags
    for _, attributes in tags:
        assert not attributes.keys() & {"src", "href", "srcset", "action", "onclick"}
    policies = [attributes["content"] for _, attributes in tags if "http-equiv" in attributes]
    assert policies[0].startswith("default-src 'none';")


@pytest.mark.parametrize("name", ["tied", "line", "volume", "dense"])
def test_the_kernels_of_the_page_are_those_of_the_pictures(name):
    for layer in pictures_of(*model_and_plan(name)).kernels:
        figure = kernels_figure(layer)
        shown = torch.stack([torch.tensor(frame.data[0].z) for frame in figure.frames])
        columns = torch.stack([torch.tensor(frame.data[1].x) for frame in figure.frames])
        rows = torch.stack([torch.tensor(frame.data[1].y) for frame in figure.frames])
        assert torch.equal(shown, layer.cells)
        assert torch.equal(torch.stack([rows, columns], -1), layer.positions)
        assert figure.data[0].z.tolist() == layer.cells[0].tolist()


def test_hostile_names_stay_text():
    pictures = pictures_of(*model_and_plan("tied"))
    size = pictures.positions[0].size
    track = TrackPicture(
        name=HOSTILE,
        size=size,
        speed=(None, 1.0),
        spread=(None, 1.0),
        border=(0.0, 0.0),
        frames=(((0.0,), (0.0,)), ((None,), (1.0,))),
    )
    history = HistoryPicture(steps=(0, 1), moving_steps=(0, 1), tracks=(track,))
    row = pictures.positions[0].row
    one = replace(
        pictures,
        positions=(pictures.positions[0],),
        kernels=(replace(pictures.kernels[0], name=row.layers[0]),),
        why_not_rebuilt="none",
        history=replace(history, tracks=(replace(track, name="stage"),)),
    )
    hostile_row = replace(row, name=HOSTILE, layers=(HOSTILE,))
    hostile = replace(
        one,
        name=HOSTILE,
        positions=(replace(pictures.positions[0], row=hostile_row),),
        kernels=(replace(pictures.kernels[0], name=HOSTILE),),
        why_not_rebuilt=HOSTILE,
        history=history,
        report=replace(pictures.report, model=HOSTILE),
    )
    text = own_part(page(hostile))
    assert shape_of(Tags(text).tags) == shape_of(Tags(own_part(page(one))).tags)
    assert text.count("&lt;/script&gt;&lt;b onclick=alert(1)&gt;&amp;") == 6
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(("size", "tie"), [(9, "none"), (101, "stage")])
def test_a_wide_model_has_a_small_page(size, tie):
    text = page(pictures_of(*convert("timm:mobilenetv3_small_100", size, tie=tie)))
    assert len(own_part(text)) < 3e6
