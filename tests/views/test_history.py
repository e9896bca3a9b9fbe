"""Records of positions during training are drawn, or refused in one line if they are damaged."""

import contextlib
import copy
import functools
import json
import math
import operator
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.history import CURVE_LABELS, read_checkpoint_history, read_history
from dcls_convert.views.plot import FIGURES, draw

from .test_figures import convert_module, pictures_of

TENSOR_FIELDS = """
    name speed border_share overlap_share mean_distance mean_sigma layers spread spread.0
    followed followed.0 followed.0.0 histograms histograms.0 histograms.0.0
"""
FIELDS = ["format", "step", *(f"positions.0.{field}" for field in TENSOR_FIELDS.split())]
NUMBERS = [math.nan, math.inf, 1e39, 1e41, 1e308, -1e308, 2**62, 2**70, -1, 0, 0.5, 1.5, 40]
VALUES = [*NUMBERS, None, [], [0.5], [[0.5]], [1e308], "</script>\x1b[31m\u2028", {"deep": [[]]}]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Pictures of a small network, and the lines of a tracker.

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
    return pictures_of(model, plan), [json.loads(line) for line in path.read_text().splitlines()]


def as_jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def edited(lines, edits):
    """Return the lines with edits (slice of the lines, dotted field, new value)."""
    lines = copy.deepcopy(lines)
    for edited_lines, field, value in edits:
        *parents, last = (int(key) if key.isdigit() else key for key in field.split("."))
        for line in lines[edited_lines]:
            with contextlib.suppress(TypeError, LookupError):  # an earlier edit removed the field
                functools.reduce(operator.getitem, parents, line)[last] = copy.deepcopy(value)
    return lines


steps = st.sampled_from([slice(None), slice(0, 1), slice(1, 2)])  # all or one of them
edits = st.lists(st.tuples(steps, st.sampled_from(FIELDS), st.sampled_from(VALUES)), max_size=2)


@given(edits)
def test_a_damaged_record_is_refused_in_one_line_or_drawn(tracked, tmp_path_factory, changes):
    pictures, lines = tracked
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(as_jsonl(edited(lines, changes)))
    refused = ""
    history = None
    try:
        history = read_history(path)
    except CheckpointError as error:
        refused = str(error)
    if history is None:
        assert refused.startswith(str(path))
        assert refused.isprintable()
        return
    assert draw(replace(pictures, history=history), "history", ".svg").startswith(b"<?xml")


SECOND = slice(1, 2)
DAMAGES = {
    "line 2: step: ": [(SECOND, "step", 2**70)],
    "line 2: positions.0.border_share: ": [(SECOND, "positions.0.border_share", 1e308)],
    "line 2: positions.0.speed: ": [(SECOND, "positions.0.speed", math.nan)],
    "has format 2, but this dcls-convert reads format 1 at most": [(SECOND, "format", 2)],
    "the records of steps 0 and 1 differ in tensors": [(SECOND, "positions.0.histograms", [])],
    "the records follow different numbers of elements of": [
        (SECOND, "positions.0.followed", [[0.5], [0.5]])
    ],
    "line 1: positions.0.histograms.0: ": [(slice(0, 1), "positions.0.histograms.0", [])],
}


@pytest.mark.parametrize("message", [*DAMAGES, "has no records"])
def test_a_record_that_no_picture_can_show_is_refused(tracked, tmp_path, message):
    data = as_jsonl(edited(tracked[1], DAMAGES[message])) if message in DAMAGES else b""
    (tmp_path / "odd.jsonl").write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_history(tmp_path / "odd.jsonl")


def test_names_with_the_same_end_are_distinguished(tmp_path):
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4))
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), block)
    model, plan = convert_module(net, (4, 16, 16), 7, tie="none")
    PositionTracker(model, tmp_path / "positions.jsonl").update(0)
    history = read_checkpoint_history(tmp_path / "positions.jsonl", plan)
    assert [track.name for track in history.tracks] == ["0", "1.0"]


def test_speeds_and_positions_are_those_of_the_training(tracked, tmp_path):
    lines = tracked[1]
    (tmp_path / "track.jsonl").write_bytes(as_jsonl(lines))
    history = read_history(tmp_path / "track.jsonl")
    (track,) = history.tracks
    assert history.steps == history.moving_steps == (0, 1, 2)
    assert track.speed == (None, 0.0, pytest.approx(1.0))
    assert track.size == (7, 7)
    for before, after in zip(*(track.frames[step] for step in (1, 2)), strict=True):
        assert all(
            math.isclose(old + 1, new, abs_tol=0.02) for old, new in zip(before, after, strict=True)
        )
    assert track.frames[0]


def test_a_speed_between_unknown_speeds_is_drawn(tracked, tmp_path):
    """A run that is resumed twice, an epoch apart, has such a speed."""
    pytest.importorskip("matplotlib")
    pictures, lines = tracked
    lines = edited(lines, [(slice(0, 1), "positions.0.speed", None)])
    lines = edited(lines, [(slice(2, 3), "positions.0.speed", None)])
    lines = edited(lines, [(SECOND, "positions.0.speed", 0.5)])
    (tmp_path / "resumed.jsonl").write_bytes(as_jsonl(lines))
    figure = FIGURES["history"](replace(pictures, history=read_history(tmp_path / "resumed.jsonl")))
    speed, spread, _ = figure.axes
    (curve,) = speed.lines
    assert curve.get_marker() == "."  # a line would not show it
    assert [height for height in curve.get_ydata() if height == height] == [0.5]
    assert len(spread.lines) == 1


@pytest.mark.parametrize("steps", [1, 3])
def test_the_axes_of_the_figure_say_what_they_show_and_cut_no_curve(tracked, tmp_path, steps):
    pytest.importorskip("matplotlib")
    pictures, lines = tracked
    (tmp_path / "track.jsonl").write_bytes(as_jsonl(lines[:steps]))
    figure = FIGURES["history"](replace(pictures, history=read_history(tmp_path / "track.jsonl")))
    assert [panel.get_ylabel() for panel in figure.axes] == list(CURVE_LABELS.values())
    for panel in figure.axes:
        (curve,) = panel.lines
        bottom, top = panel.get_ylim()
        assert bottom == 0
        assert top > 1.04 * max(filter(math.isfinite, curve.get_ydata()), default=0)
        assert all(tick == round(tick) for tick in panel.get_xticks())
