"""Records of positions during training are drawn, or refused in one line if they are damaged."""

import contextlib
import copy
import functools
import json
import math
import operator
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.history import read_history
from dcls_convert.views.plot import CURVES, draw, make_figure

from .test_figures import convert_module, depthwise

pytest.importorskip("matplotlib")
NAME = "0.positions"
FIELDS = ["step", "positions", NAME, "speed", "border_share", "spread"]
NUMBERS = [math.nan, math.inf, 1e39, 1e41, 1e308, -1e308, 2**62, 2**70, -1, 0, 0.5, 1.5, 40]
VALUES = [*NUMBERS, None, [], {}, "</script>\x1b[31m\u2028", {"deep": [[]]}]


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


def edited(lines, edits):
    """Return the lines with edits (slice of the lines, field, new value)."""
    parents = {"speed": ["positions", NAME], NAME: ["positions"]}
    parents["border_share"] = parents["spread"] = parents["speed"]
    lines = copy.deepcopy(lines)
    for edited_lines, field, value in edits:
        for line in lines[edited_lines]:
            with contextlib.suppress(TypeError, LookupError):  # an earlier edit removed the field
                parent = functools.reduce(operator.getitem, parents.get(field, []), line)
                parent[field] = copy.deepcopy(value)
    return lines


steps = st.sampled_from([slice(None), slice(0, 1), slice(1, 2)])  # all or one of them
edits = st.lists(st.tuples(steps, st.sampled_from(FIELDS), st.sampled_from(VALUES)), max_size=2)


@given(edits)
def test_a_damaged_record_is_refused_in_one_line_or_drawn(tracked, tmp_path_factory, changes):
    model, plan, lines = tracked
    path = write(tmp_path_factory.getbasetemp() / "damaged.jsonl", edited(lines, changes))
    refused = ""
    history = ()
    try:
        history = read_history(path, plan)
    except CheckpointError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(str(path))
        assert refused.isprintable()
    else:
        assert draw(plan, model.state_dict(), ".svg", history).startswith(b"<?xml")


@pytest.mark.parametrize(
    "net", [nn.Conv2d(4, 4, 3), depthwise(2), nn.Sequential(OrderedDict([("10", depthwise(1)[0])]))]
)
def test_the_record_of_another_model_is_refused(tracked, tmp_path, net):
    if not isinstance(net, nn.Conv2d):
        convert_module(net, (4, 16, 16), 9, tie="none")
    PositionTracker(net, tmp_path / "positions.jsonl").update(0)
    with pytest.raises(CheckpointError, match="is a record of another model; it follows "):
        read_history(tmp_path / "positions.jsonl", tracked[1])


def test_a_record_without_records_is_refused(tracked, tmp_path):
    with pytest.raises(CheckpointError, match=r"empty\.jsonl: has no records"):
        read_history(write(tmp_path / "empty.jsonl", []), tracked[1])


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
    lines = edited(tracked[2], [(slice(None), "speed", None), (slice(1, 2), "speed", 0.5)])
    speed, *_ = panels_of(tracked, tmp_path / "resumed.jsonl", lines)
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


def test_every_curve_has_a_colour_of_its_own_and_the_legend_covers_none(tmp_path):
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
