"""Records of positions during training are drawn, or refused in one line if they are damaged."""

import copy
import json
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.history import read_history
from dcls_convert.views.plot import CURVES, draw, make_figure

from .test_figures import convert_module, depthwise

pytest.importorskip("matplotlib")
NAME = "0.positions"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A small network, its plan, and the lines of a tracker.

    The positions moved by one cell between steps 1 and 2.
    """
    model, plan = convert_module(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2)), (2, 16, 16), 7
    )
    path = tmp_path_factory.mktemp("track") / "positions.jsonl"
    tracker = PositionTracker(model, path)
    for step in range(3):
        tracker.update(step)
        with torch.no_grad():
            if step == 1:
                model[0].positions += 1
    return model, plan, [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def panels_of(tracked, path, lines):
    """The panels with the curves of a record."""
    model, plan, _ = tracked
    history = read_history(write(path, lines), plan)
    return make_figure(plan, model.state_dict(), history).subfigs[1].axes


def edited(lines, **fields):
    """Return the lines with other values of some fields, in all of them."""
    lines = copy.deepcopy(lines)
    for line in lines:
        line["positions"][NAME] |= fields
    return lines


@pytest.mark.parametrize("value", [-1, "</script>\x1b[31m", [], 1e41, math.nan])
def test_a_damaged_record_is_refused_in_one_line(tracked, tmp_path, value):
    path = write(tmp_path / "damaged.jsonl", edited(tracked[2], spread=value))
    with pytest.raises(CheckpointError) as refused:
        read_history(path, tracked[1])
    assert str(refused.value).startswith(f"{path}: line 1 is not a record of a PositionTracker")
    assert str(refused.value).isprintable()


def test_any_valid_numbers_are_drawn(tracked, tmp_path):
    model, plan, lines = tracked
    path = write(tmp_path / "odd.jsonl", edited(lines, spread=1e40, speed=None, border_share=0))
    assert draw(plan, model.state_dict(), ".svg", read_history(path, plan)).startswith(b"<?xml")


@pytest.mark.parametrize(
    "net", [nn.Conv2d(4, 4, 3), depthwise(2), nn.Sequential(OrderedDict([("10", depthwise(1)[0])]))]
)
def test_the_record_of_another_model_is_refused(tracked, tmp_path, net):
    if not isinstance(net, nn.Conv2d):
        convert_module(net, (4, 16, 16), 9, tie="none")
    PositionTracker(net, tmp_path / "positions.jsonl").update(0)
    with pytest.raises(CheckpointError, match="is a record of another model; it follows "):
        read_history(tmp_path / "positions.jsonl", tracked[1])


def test_the_record_of_a_model_inside_another_is_that_of_the_model(tmp_path):
    """Also if names of the model have the same end."""
    model, plan = convert_module(
        nn.Sequential(*depthwise(1), depthwise(1)), (4, 16, 16), 7, tie="none"
    )
    PositionTracker(nn.Sequential(model), tmp_path / "positions.jsonl").update(0)
    (record,) = read_history(tmp_path / "positions.jsonl", plan)
    assert list(record.positions) == ["0.0.positions", "0.1.0.positions"]


def test_curves_are_those_of_the_training(tracked, tmp_path):
    speed, _, border = panels_of(tracked, tmp_path / "track.jsonl", tracked[2])
    (curve,) = speed.lines
    assert list(curve.get_xdata()) == [0, 1, 2]
    assert math.isnan(curve.get_ydata()[0])
    assert list(curve.get_ydata())[1:] == [0, pytest.approx(1)]
    assert border.lines[0].get_ydata()[2] > border.lines[0].get_ydata()[0]


def test_a_speed_between_unknown_speeds_is_drawn(tracked, tmp_path):
    """A run that is resumed twice, an epoch apart, has such a speed."""
    first, second, third = edited(tracked[2], speed=None)
    second["positions"][NAME]["speed"] = 0.5
    speed, *_ = panels_of(tracked, tmp_path / "resumed.jsonl", [first, second, third])
    (curve,) = speed.lines
    assert curve.get_marker() == "."  # a line would not show it
    assert [height for height in curve.get_ydata() if height == height] == [0.5]


@pytest.mark.parametrize("steps", [1, 3])
def test_axes_say_what_they_show_and_cut_no_curve(tracked, tmp_path, steps):
    panels = panels_of(tracked, tmp_path / "track.jsonl", tracked[2][:steps])
    assert [panel.get_ylabel() for panel in panels] == list(CURVES.values())
    for panel in panels:
        (curve,) = panel.lines
        bottom, top = panel.get_ylim()
        assert bottom == 0
        assert top > 1.04 * max(filter(math.isfinite, curve.get_ydata()), default=0)
        assert all(tick == round(tick) for tick in panel.get_xticks())


def test_every_curve_has_a_colour_of_its_own_and_the_legend_covers_none(tmp_path, monkeypatch):
    monkeypatch.setattr("dcls_convert.views.plot.MAX_TENSORS", 2)  # others take time alone
    model, plan = convert_module(depthwise(20), (4, 16, 16), 9, tie="none")
    PositionTracker(model, tmp_path / "positions.jsonl").update(0)
    history = read_history(tmp_path / "positions.jsonl", plan)
    figure = make_figure(plan, model.state_dict(), history)
    figure.draw_without_rendering()
    curves = figure.subfigs[1]
    (legend,) = curves.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(index) for index in range(20)]
    lowest = min(panel.get_tightbbox().y0 for panel in curves.axes)
    assert legend.get_window_extent().y1 <= lowest
    colours = {tuple(line.get_color()) for line in curves.axes[0].lines}
    assert len(colours) == 20
