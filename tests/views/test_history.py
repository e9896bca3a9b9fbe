"""Records of positions during training are drawn, or refused in one line if they are damaged."""

import copy
import json
import math

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


@pytest.mark.parametrize("value", [-1, "</script>\x1b[31m", math.nan])
def test_a_damaged_record_is_refused_in_one_line(tracked, tmp_path, value):
    path = write(tmp_path / "damaged.jsonl", edited(tracked[2], spread=value))
    with pytest.raises(CheckpointError) as refused:
        read_history(path, tracked[1])
    assert str(refused.value).startswith(f"{path}: line 1 is not a record of a PositionTracker")
    assert str(refused.value).isprintable()


def test_the_record_of_another_model_is_refused(tracked, tmp_path):
    other, _ = convert_module(depthwise(2), (4, 16, 16), 9, tie="none")
    PositionTracker(other, tmp_path / "positions.jsonl").update(0)
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


def test_curves_are_those_of_the_training_and_are_not_cut(tracked, tmp_path):
    panels = panels_of(tracked, tmp_path / "track.jsonl", tracked[2])
    speed, _, border = (panel.lines[0] for panel in panels)
    assert list(speed.get_xdata()) == [0, 1, 2]
    assert math.isnan(speed.get_ydata()[0])
    assert list(speed.get_ydata())[1:] == [0, pytest.approx(1)]
    assert border.get_ydata()[2] > border.get_ydata()[0]
    assert [panel.get_ylabel() for panel in panels] == list(CURVES.values())
    for panel in panels:
        heights = filter(math.isfinite, panel.lines[0].get_ydata())
        assert panel.get_ylim()[0] == 0
        assert panel.get_ylim()[1] > 1.04 * max(heights)


def test_a_single_speed_and_any_valid_number_are_drawn(tracked, tmp_path):
    """A run that is resumed twice, an epoch apart, has a speed between unknown ones."""
    model, plan, lines = tracked
    lines = edited(lines, spread=1e40, speed=None)
    lines[1]["positions"][NAME]["speed"] = 0.5
    speed, *_ = panels_of(tracked, tmp_path / "resumed.jsonl", lines)
    (curve,) = speed.lines
    assert curve.get_marker() == "."  # a line would not show it
    history = read_history(tmp_path / "resumed.jsonl", plan)
    assert draw(plan, model.state_dict(), ".svg", history).startswith(b"<?xml")
