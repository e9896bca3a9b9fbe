"""Records of positions during trainings are drawn, with their units and names, or refused in one
line.
"""

import copy
import json
import math

import pytest
import torch
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.history import read_trainings
from dcls_convert.views.plot import draw, make_figure

from .test_figures import convert_module, depthwise

pytest.importorskip("matplotlib")
NAME = "0.positions"


def track(path, unit="epoch", model=None):
    """Write the records of a training; positions moved by one cell between 1 and 2."""
    model = model or nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2))
    model, plan = convert_module(model, (2, 16, 16), 7, tie="none")
    path.parent.mkdir(exist_ok=True)
    tracker = PositionTracker(model, path, unit=unit)
    for number in range(3):
        tracker.update(number)
        with torch.no_grad():
            if number == 1:
                model[0].positions += 1
    return model, plan


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A small network, its plan, and the lines of a tracker."""
    path = tmp_path_factory.mktemp("track") / "positions.jsonl"
    model, plan = track(path)
    return model, plan, [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def curves_of(model, plan, *paths):
    """The part of the figure with the curves of these files."""
    return make_figure(plan, model.state_dict(), read_trainings(paths, plan)).subfigs[-1]


def texts_of(part):
    return " ".join(text.get_text() for text in part.texts)


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
        read_trainings([path], tracked[1])
    assert str(refused.value).startswith(f"{path}: line 1 is not a record of a PositionTracker")
    assert str(refused.value).isprintable()


def test_the_record_of_another_model_is_refused(tracked, tmp_path):
    other, _ = convert_module(depthwise(2), (4, 16, 16), 9, tie="none")
    PositionTracker(other, tmp_path / "positions.jsonl").update(0)
    with pytest.raises(CheckpointError, match="is a record of another model; it follows "):
        read_trainings([tmp_path / "positions.jsonl"], tracked[1])


def test_the_record_of_a_model_inside_another_is_that_of_the_model(tmp_path):
    """Also if names of the model have the same end."""
    model, plan = convert_module(
        nn.Sequential(*depthwise(1), depthwise(1)), (4, 16, 16), 7, tie="none"
    )
    PositionTracker(nn.Sequential(model), tmp_path / "positions.jsonl").update(0)
    (training,) = read_trainings([tmp_path / "positions.jsonl"], plan)
    assert list(training.records[0].positions) == ["0.0.positions", "0.1.0.positions"]


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_curves_are_those_of_the_training_and_are_not_cut(tmp_path, unit):
    path = tmp_path / "track.jsonl"
    panels = curves_of(*track(path, unit), path).axes
    speed, _, border = (panel.lines[0] for panel in panels)
    assert list(speed.get_xdata()) == [0, 1, 2]
    assert math.isnan(speed.get_ydata()[0])
    assert list(speed.get_ydata())[1:] == [0, pytest.approx(1)]
    assert border.get_ydata()[2] > border.get_ydata()[0]
    labels = [f"speed (cells per {unit})", "spread (cells)", "share at the border"]
    assert [panel.get_ylabel() for panel in panels] == labels
    for panel in panels:
        assert panel.get_xlabel() == unit
        heights = filter(math.isfinite, panel.lines[0].get_ydata())
        assert panel.get_ylim()[0] == 0
        assert panel.get_ylim()[1] > 1.04 * max(heights)


def test_a_panel_that_would_be_empty_is_a_sentence_instead(tracked, tmp_path):
    model, plan, lines = tracked
    path = write(tmp_path / "track.jsonl", edited(lines, border_share=0.0, speed=None))
    part = curves_of(model, plan, path)
    assert [panel.get_ylabel() for panel in part.axes] == ["spread (cells)"]
    texts = "Speed: unknown in all records. Share at the border: 0 in all records."
    assert texts_of(part).split() == texts.split()
    path = write(tmp_path / "track.jsonl", edited(lines, border_share=0.0, speed=None, spread=0.0))
    assert curves_of(model, plan, path).axes == []


def test_a_single_speed_and_any_valid_number_are_drawn(tracked, tmp_path):
    """A run that is resumed twice, an epoch apart, has a speed between unknown ones."""
    model, plan, lines = tracked
    lines = edited(lines, spread=1e40, speed=None)
    lines[1]["positions"][NAME]["speed"] = 0.5
    path = write(tmp_path / "resumed.jsonl", lines)
    speed, *_ = curves_of(model, plan, path).axes
    (curve,) = speed.lines
    assert curve.get_marker() == "."  # a line would not show it
    trainings = read_trainings([path], plan)
    assert draw(plan, model.state_dict(), ".svg", trainings).startswith(b"<?xml")


def test_of_several_trainings_each_curve_is_a_mean_with_the_name_that_tells_them_apart(tmp_path):
    paths = [tmp_path / run / "positions.jsonl" for run in ("first", "second")]
    network = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1, groups=2) for _ in range(2)))
    for path in paths:
        model, plan = track(path, model=copy.deepcopy(network))
    lines = [json.loads(line) for line in paths[1].read_text().splitlines()[:2]]
    for line, first_spread in zip(lines, (0.5, None), strict=True):
        line["positions"]["0.positions"]["spread"] = first_spread
        line["positions"]["1.positions"]["spread"] = 1.5
    write(paths[1], lines)
    part = curves_of(model, plan, *paths)
    assert "mean over 2 positions tensors" in texts_of(part)
    _, spread, _ = part.axes
    assert list(spread.lines[1].get_ydata()) == [1.0, 1.5]  # of what is known
    names = [text.get_text() for text in part.legends[0].get_texts()]
    assert names == [line.get_label() for line in spread.lines] == ["first", "second"]
    looks = {(line.get_color(), line.get_linestyle()) for line in spread.lines}
    assert len(looks) == 2
    curves = {len(panel.lines) for panel in curves_of(model, plan, paths[0]).axes}
    assert curves == {2}  # one for each positions tensor


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("runs/a/positions.jsonl runs/b/positions.jsonl", "a b"),
        ("runs/a/1/positions.jsonl runs/b/2/positions.jsonl", "a/1 b/2"),
        ("runs/a-1.jsonl runs/a-2.jsonl", "a-1 a-2"),
        ("here/positions.jsonl here/b/positions.jsonl", "here here/b"),
    ],
)
def test_trainings_are_named_by_what_differs_in_their_paths(tracked, tmp_path, paths, names):
    files = [tmp_path / path for path in paths.split()]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, tracked[2])
    trainings = read_trainings(files, tracked[1])
    assert [training.name for training in trainings] == names.split()


def test_trainings_that_count_different_units_are_refused_in_one_line(tmp_path):
    paths = [tmp_path / f"{unit}.jsonl" for unit in ("step", "epoch")]
    for path in paths:
        _, plan = track(path, path.stem)
    with pytest.raises(CheckpointError) as refused:
        read_trainings(paths, plan)
    message = f"{paths[1]}: counts epochs, {paths[0]} steps; draw them in two pictures"
    assert str(refused.value) == message
