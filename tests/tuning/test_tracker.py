"""Records of positions in training: what they say, that they are read back, that resumed runs go on."""

import copy
import io
import json
import math

import pytest
import timm
import torch
from torch import nn

import dcls_convert
from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConv1d, DclsConv2d
from dcls_convert.layers.position_statistics import border_share, mean_distance, overlap_share, spread
from dcls_convert.layers.positions import shared_parameters
from dcls_convert.tuning import tracker as tracking

from ..conftest import TINY


class Pair(nn.Module):
    """Two layers of unlike windows, one with a dense axis, one with sigmas."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.one = DclsConv2d(2, 3, kernel_count=4, dilated_kernel_size=(4, 7))
            self.two = DclsConv2d(
                2, 2, kernel_count=2, dilated_kernel_size=(3, 9), dense_axes=[0], interpolation="gaussian"
            )


@pytest.fixture
def model():
    return Pair()


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for shared in shared_parameters(model):
            shared.tensor.add_(torch.randn(shared.tensor.shape, generator=generator) * 0.3)
    tuning.clamp_positions_(model)


def run(model, steps, tracker):
    """Train for these steps; each moves the positions in a way of its own."""
    found = []
    for step in steps:
        move(model, step)
        found.append(tracker.update(step))
    return found


def test_a_record_holds_the_statistics_of_every_tensor(model):
    record = tuning.PositionTracker(model).update(3)
    assert (record.step, [row.name for row in record.positions]) == (3, ["one.positions", "two.positions"])
    for row, layer, size in zip(record.positions, [model.one, model.two], [(4, 7), (9,)], strict=True):
        positions = layer.positions.detach()
        assert row.border_share == border_share(positions, size)
        assert row.overlap_share == overlap_share(positions)
        assert row.spread == spread(positions)
        assert row.mean_distance == mean_distance(positions)
        assert row.mean_sigma == (None if layer.sigma is None else pytest.approx(layer.sigma.mean().item()))
        assert row.speed is None


@pytest.mark.parametrize("bins_per_cell", [1, 2, 5])
def test_histograms_count_every_element_where_it_is(model, bins_per_cell):
    move(model, 0)
    for row, layer in zip(
        tuning.PositionTracker(model, bins_per_cell=bins_per_cell).update(0).positions,
        [model.one, model.two],
        strict=True,
    ):
        sizes = [layer.dilated_kernel_size[axis] for axis in layer.learnt_axes]
        for axis, (histogram, size) in enumerate(zip(row.histograms, sizes, strict=True)):
            assert (histogram.low, histogram.width) == (-(size // 2) - 0.5, 1 / bins_per_cell)
            counts = [0] * (size * bins_per_cell)
            for value in layer.positions[axis].flatten().tolist():
                counts[math.floor((value + size // 2 + 0.5) * bins_per_cell)] += 1
            assert list(histogram.counts) == counts


def test_a_histogram_of_cells_counts_the_nearest_cells():
    layer = DclsConv1d(1, 1, kernel_count=7, dilated_kernel_size=5)
    layer.positions.data = torch.tensor([-2.0, -1.6, -1.4, 0.0, 0.4, 2.0, 90.0]).reshape(1, 1, 1, 7)
    (row,) = tuning.PositionTracker(layer).update(0).positions
    assert row.histograms[0].counts == (2, 1, 2, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_speed_is_the_mean_absolute_change_of_a_coordinate_per_step(model, dtype):
    model.to(dtype)
    tracker = tuning.PositionTracker(model)
    before = {shared.name: shared.tensor.detach().clone().double() for shared in shared_parameters(model)}
    assert [row.speed for row in tracker.update(10).positions] == [None, None]
    assert [row.speed for row in tracker.update(11).positions] == [0.0, 0.0]
    move(model, 0)
    for row in tracker.update(14).positions:
        moved = (model.get_parameter(row.name).detach().double() - before[row.name]).abs().mean().item()
        assert row.speed == pytest.approx(moved / 3, rel=1e-6)
        assert row.speed > 0


def test_tied_positions_are_recorded_once_under_all_wrappers(tiny):
    dcls_convert.convert_(tiny, dilated_size=9, init="random")
    plain = tuning.PositionTracker(tiny).update(0)
    assert [(row.name, len(row.layers)) for row in plain.positions] == [
        ("stages.0.blocks.0.conv_dw.positions", 1),
        ("stages.1.blocks.dcls_positions", 2),
        ("stages.2.blocks.dcls_positions", 4),
        ("stages.3.blocks.dcls_positions", 2),
    ]
    assert plain.positions[1].layers == ("stages.1.blocks.0.conv_dw", "stages.1.blocks.1.conv_dw")
    assert tuning.PositionTracker(torch.compile(tiny)).update(0) == plain
    assert tuning.PositionTracker(nn.DataParallel(tiny)).update(0) == plain
    tiny.stages[1] = torch.compile(tiny.stages[1])
    assert tuning.PositionTracker(tiny).update(0) == plain


def test_a_model_without_dcls_layers_has_an_empty_record():
    assert tuning.PositionTracker(timm.create_model(TINY)).update(0).positions == ()


def test_the_tracker_keeps_a_copy_of_the_positions_alone_and_no_graph(model):
    tracker = tuning.PositionTracker(model)
    run(model, range(3), tracker)
    held = tracker.state_dict()["positions"]
    assert {name: tensor.shape for name, tensor in held.items()} == {
        f"{name}.positions": getattr(model, name).positions.shape for name in ("one", "two")
    }
    assert not any(tensor.requires_grad for tensor in tracker._before.values())
    assert not any(tensor.grad is not None for tensor in model.parameters())


# The file.


def test_what_is_written_is_read_back_equal(model, tmp_path):
    path = tmp_path / "track.jsonl"
    found = run(model, range(4), tuning.PositionTracker(model, path))
    assert tuning.read_track(path) == tuple(found)
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(json.dumps(record.to_dict())) for record in found]


def resumed(model_at_2, state, path):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    tracker = tuning.PositionTracker(model_at_2, path)
    tracker.load_state_dict(torch.load(buffer, weights_only=True))
    return tracker


def test_a_resumed_run_records_what_an_uninterrupted_one_would(model, tmp_path):
    path = tmp_path / "track.jsonl"
    tracker = tuning.PositionTracker(model, path)
    found = run(model, range(3), tracker)
    state, at_2 = tracker.state_dict(), copy.deepcopy(model)
    found += run(model, range(3, 6), tracker)
    assert state["step"] == 2
    assert all(record.positions[0].speed for record in found[1:])
    with path.open("a") as file:
        file.write('{"format": 1, "step": 6, "posi')  # the run was killed here
    assert tuning.read_track(path) == tuple(found)
    again = run(at_2, range(3, 5), resumed(at_2, state, path))
    assert again == found[3:5]
    assert tuning.read_track(path) == tuple(found[:5])  # step 5 belongs to what was done again
    assert len(path.read_text().splitlines()) == 8


def test_a_new_run_into_the_same_file_replaces_the_old(model, tmp_path):
    path = tmp_path / "track.jsonl"
    run(model, range(5), tuning.PositionTracker(model, path))
    second = run(model, range(2), tuning.PositionTracker(model, path))
    assert tuning.read_track(path) == tuple(second)


@pytest.mark.parametrize("content", ["important", "important\nnotes\n", '{"format": 1}\n', '{"model": "resnet"}'])
def test_a_file_that_is_no_record_is_refused_and_left_alone(model, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(dcls_convert.CheckpointError, match=r"notes\.txt: line 1: .*PositionTracker"):
        tuning.PositionTracker(model, path)
    assert path.read_text() == content


@pytest.mark.parametrize("place", ["missing/track.jsonl", "."])
def test_a_path_that_cannot_be_written_is_refused_at_once(model, tmp_path, place):
    with pytest.raises(dcls_convert.CheckpointError, match=str(tmp_path / place)):
        tuning.PositionTracker(model, tmp_path / place)


def test_reading_says_which_line_is_wrong(model, tmp_path):
    path = tmp_path / "track.jsonl"
    with pytest.raises(dcls_convert.CheckpointError, match="cannot be read"):
        tuning.read_track(path)
    path.touch()
    assert tuning.read_track(path) == ()
    run(model, range(3), tuning.PositionTracker(model, path))
    lines = path.read_text().splitlines(keepends=True)
    for broken in ("\n", "{}\n", lines[1].replace("speed", "sped"), lines[1].replace('"step": 1', '"step": "1"')):
        path.write_text(lines[0] + broken + lines[2])
        with pytest.raises(dcls_convert.CheckpointError, match=r"track\.jsonl: line 2: ") as caught:
            tuning.read_track(path)
        assert "\n" not in str(caught.value)
    path.write_text(lines[0].replace('"format": 1', '"format": 2'))
    with pytest.raises(dcls_convert.CheckpointError, match=r"line 1: has format 2.*upgrade"):
        tuning.read_track(path)


def test_positions_that_are_not_finite_are_recorded_as_such(model, tmp_path):
    path = tmp_path / "track.jsonl"
    with torch.no_grad():
        model.one.positions[0, 0, 0, 0] = math.nan
    record = tuning.PositionTracker(model, path).update(0)
    assert record.positions[0].spread[0] is None
    assert record.positions[0].spread[1] is not None
    assert record.positions[0].mean_distance is None
    assert sum(record.positions[0].histograms[0].counts) == model.one.positions[0].numel() - 1
    assert tuning.read_track(path) == (record,)


@pytest.mark.parametrize("step", [2, 1, True, 3.0, "3"])
def test_steps_go_upwards(model, step):
    tracker = tuning.PositionTracker(model)
    tracker.update(2)
    with pytest.raises(dcls_convert.DclsConvertError, match="step"):
        tracker.update(step)


@pytest.mark.parametrize("bins", [0, 1.5])
def test_bins_are_a_positive_number(model, bins):
    with pytest.raises(dcls_convert.DclsConvertError, match="bins_per_cell"):
        tuning.PositionTracker(model, bins_per_cell=bins)


def test_rank_0_alone_writes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    records = {}
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        path = tmp_path / f"{rank}.jsonl"
        writer = FakeWriter()
        records[rank] = tuning.PositionTracker(model, path, tensorboard=writer).update(0)
        assert path.exists() == bool(writer.scalars) == (rank == 0)
    assert records[0] == records[1]


# TensorBoard.


class FakeWriter:
    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_histogram_raw(self, tag, *, global_step, **values):
        self.histograms[tag, global_step] = values


def test_tensorboard_gets_what_the_record_holds(model):
    writer = FakeWriter()
    tracker = tuning.PositionTracker(model, tensorboard=writer)
    first, second = run(model, [0, 5], tracker)
    row = second.positions[0]
    assert writer.scalars["speed/one.positions", 5] == row.speed
    assert writer.scalars["border_share/one.positions", 5] == row.border_share
    assert ("speed/one.positions", 0) not in writer.scalars
    assert writer.scalars["mean_sigma/two.positions", 0] == first.positions[1].mean_sigma
    assert ("mean_sigma/one.positions", 0) not in writer.scalars
    drawn = writer.histograms["positions/one.positions/axis1", 5]
    assert tuple(drawn["bucket_counts"]) == row.histograms[1].counts
    assert drawn["bucket_limits"] == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert (drawn["min"], drawn["max"], drawn["num"]) == (-3.5, 3.5, model.one.positions[1].numel())
    assert drawn["sum"] == sum(c * n for c, n in zip(range(-3, 4), row.histograms[1].counts, strict=True))


def test_tensorboard_itself_reads_it(model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tuning.PositionTracker(model, tensorboard=tmp_path) as tracker:
        records = run(model, range(3), tracker)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = events.Scalars("mean_distance/one.positions")
    assert [(event.step, event.value) for event in found] == [
        (record.step, pytest.approx(record.positions[0].mean_distance, rel=1e-6)) for record in records
    ]
    assert "positions/two.positions/axis0" in events.Tags()["histograms"]


def test_tensorboard_that_is_not_there_is_said_so(model, tmp_path, monkeypatch):
    monkeypatch.setitem(tracking.__dict__["torch"].utils.__dict__, "tensorboard", None)
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(dcls_convert.DclsConvertError, match="pip install tensorboard"):
        tuning.PositionTracker(model, tensorboard=tmp_path)
