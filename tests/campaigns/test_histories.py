"""Records of positions in training, damaged: refused in one line, or drawn, with numbers that all programs can read."""

import contextlib
import copy
import functools
import json
import math
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from dcls_convert import convert_and_save_
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.history import read_history
from dcls_convert.views.page import page
from dcls_convert.views.pictures import pictures_of_folder
from dcls_convert.views.plot import draw

from .campaign import Finding, refusal
from .folder_edits import BYTES, changed, changes
from .nets import build
from .texts import texts

pytestmark = pytest.mark.campaign

OF_TENSOR = """
    speed border_share overlap_share mean_distance mean_sigma layers spread spread.0 followed followed.0 followed.0.0
    histograms histograms.0.low histograms.0.width histograms.0.counts histograms.0.counts.0
"""
FIELDS = ["step", *(f"positions.0.{field}" for field in OF_TENSOR.split())]
NUMBERS = [math.nan, math.inf, 1e39, 1e41, 1e308, -1e308, 2**62, 2**70, -1, 0, 0.5, 1.5, 40]
VALUES = [*NUMBERS, None, [], [0.5], [[0.5]], [1e308]]


@pytest.fixture
def model(tmp_path):
    convert_and_save_(model := build(), tmp_path / "net", dilated_size=7, kernel_count=3, input_size=(3, 32, 32))
    return model


@pytest.fixture
def lines(model, tmp_path):
    """As a tracker writes them."""
    tracker = PositionTracker(model, tmp_path / "positions.jsonl")
    for step in range(3):
        tracker.update(step)
    return [json.loads(line) for line in (tmp_path / "positions.jsonl").read_text().splitlines()]


def records(lines):
    """Bytes of a file."""
    edits = st.tuples(st.integers(0, len(lines) - 1), st.sampled_from(FIELDS), st.sampled_from(VALUES))
    known = st.lists(edits, max_size=2).map(lambda each: edited(copy.deepcopy(lines), each))
    any_place = st.lists(changes, max_size=2).map(lambda each: changed(copy.deepcopy(lines), each))
    whole = (
        known | known | any_place | texts.map(lambda name: edited(copy.deepcopy(lines), renamed(lines, name)))
    ).map(lambda found: "".join(json.dumps(line) + "\n" for line in found).encode())
    at, byte = st.integers(0, 10**6), st.integers(0, 255)
    bytes_changed = st.tuples(whole, st.lists(st.tuples(at, byte), max_size=3), st.none() | at).map(damaged)
    return st.one_of(whole, whole, whole, bytes_changed, st.sampled_from(BYTES).map(lambda line: line + b"\n"))


def edited(lines, edits):
    for index, field, value in edits:
        *above, last = (int(key) if key.isdigit() else key for key in field.split("."))
        with contextlib.suppress(TypeError, LookupError):  # an edit before left nothing there
            functools.reduce(operator.getitem, above, lines[index])[last] = copy.deepcopy(value)
    return lines


def renamed(lines, name):
    """One tensor, in the same way at all steps."""
    return [(index, "positions.0.name", name) for index in range(len(lines))]


def damaged(given):
    data, edits, cut = bytearray(given[0]), given[1], given[2]
    for place, byte in edits if data else ():
        data[place % len(data)] = byte
    return bytes(data if cut is None else data[: cut % (len(data) + 1)])


def test_histories(campaign, tmp_path, lines):
    pictures = pictures_of_folder(tmp_path / "net")
    draw(replace(pictures, history=read_history(tmp_path / "positions.jsonl")), "history", ".svg")  # imports
    path = tmp_path / "damaged.jsonl"

    def check(data):
        path.write_bytes(data)
        history, _ = refusal(lambda: read_history(path))
        if history is None:
            return False
        seen = replace(pictures, history=history)
        text = page(seen)
        if not text.isascii() or not text.replace("\n", "").isprintable():
            raise Finding("a page with control characters")
        if len(data) % 3 == 0:  # some; it takes longer than all else
            draw(seen, "history", (".svg", ".png")[len(data) % 2])
        return True

    torch.set_num_threads(1)
    campaign.run(records(lines), check, folder=tmp_path)
