"""Records of positions in training: their contents, and reading them back."""

import copy
import math

import pytest
import torch
from torch import nn

import dcls_convert
from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.layers.position_statistics import (
    border_share,
    mean_distance,
    overlap_share,
    rms_per_axis,
)
from dcls_convert.networks.position_parameters import position_parameters
from dcls_convert.tuning.tracker import FOLLOWED


@pytest.fixture
def model():
    """Two layers with different windows. One has more elements than are followed, the other has a
    dense axis and sigmas.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one = DclsConv2d(6, 3, kernel_count=4, dilated_kernel_size=(4, 7))
        options = {"dense_axes": [0], "interpolation": "gaussian"}
        two = DclsConv2d(2, 2, kernel_count=2, dilated_kernel_size=(3, 9), **options)
        return nn.ModuleDict({"one": one, "two": two})


def run(model, steps, tracker):
    """Move the positions in each of these steps, and return the records."""
    records = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in position_parameters(model):
                noise = torch.randn(parameter.tensor.shape, generator=generator)
                parameter.tensor.add_(noise * 0.3)
        tuning.clamp_positions_(model)
        records.append(tracker.update(step))
    return records


def test_a_record_holds_the_statistics_of_every_tensor(model):
    (record,) = run(model, [3], tuning.PositionTracker(model))
    assert (record.step, [row.name for row in record.positions]) == (
        3,
        ["one.positions", "two.positions"],
    )
    for row, layer, size in zip(
        record.positions, [model["one"], model["two"]], [(4, 7), (9,)], strict=True
    ):
        positions = layer.positions.detach()
        assert (row.border_share, row.overlap_share) == (
            border_share(positions, size),
            overlap_share(positions),
        )
        assert (row.spread, row.mean_distance) == (
            rms_per_axis(positions),
            mean_distance(positions),
        )
        assert row.mean_sigma == (
            None if layer.sigma is None else pytest.approx(layer.sigma.mean().item())
        )
        for coordinate, histogram, side in zip(positions, row.histograms, size, strict=True):
            counts = [0] * side
            for value in coordinate.flatten().tolist():
                counts[math.floor(value + side // 2 + 0.5)] += 1
            assert list(histogram) == counts
        # The followed elements are evenly spaced, so they are the same in every record.
        flat = positions.flatten(1)
        count = len(row.followed[0])
        index = [number * flat.shape[1] // count for number in range(count)]
        assert len(set(index)) == count == min(FOLLOWED, flat.shape[1])
        torch.testing.assert_close(torch.tensor(row.followed), flat[:, index], rtol=0, atol=0.00501)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_speed_is_the_mean_absolute_change_of_a_coordinate_per_step(model, dtype):
    model.to(dtype)
    tracker = tuning.PositionTracker(model)
    before = {
        parameter.name: parameter.tensor.detach().clone().double()
        for parameter in position_parameters(model)
    }
    assert [row.speed for row in tracker.update(10).positions] == [None, None]
    assert [row.speed for row in tracker.update(11).positions] == [0.0, 0.0]
    for row in run(model, [14], tracker)[0].positions:
        after = model.get_parameter(row.name).detach().double()
        mean_move = (after - before[row.name]).abs().mean().item()
        assert row.speed == pytest.approx(mean_move / 3, rel=1e-6)
        assert row.speed > 0


def test_tied_positions_are_recorded_once(tiny):
    assert tuning.PositionTracker(tiny).update(0).positions == ()
    dcls_convert.convert_(tiny, dilated_size=9, init="random")
    record = tuning.PositionTracker(tiny).update(0)
    assert [len(row.layers) for row in record.positions] == [1, 2, 4, 2]
    untied, tied, *_ = record.positions
    assert (untied.name, tied.name) == (
        "stages.0.blocks.0.conv_dw.positions",
        "stages.1.blocks.dcls_positions",
    )
    assert tied.layers == ("stages.1.blocks.0.conv_dw", "stages.1.blocks.1.conv_dw")


def test_records_are_read_back_as_written(model, tmp_path):
    path = tmp_path / "track.jsonl"
    tracker = tuning.PositionTracker(model, path)
    records = run(model, range(3), tracker)
    with torch.no_grad():
        model["one"].positions[0, 0, 0, 0] = math.nan
    records.append(tracker.update(3))
    row = records[-1].positions[0]
    assert (row.spread[0], row.mean_distance, row.followed[0][0]) == (None, None, None)
    assert row.spread[1] is not None
    assert sum(row.histograms[0]) == model["one"].positions[0].numel() - 1
    assert tuning.read_track(path) == tuple(records)
    with path.open("a") as file:
        file.write('{"format": 1, "step": 4, "posi')  # the run was killed here
    assert tuning.read_track(path) == tuple(records)


def test_a_run_that_is_resumed_has_the_record_of_an_uninterrupted_one(model, tmp_path):
    same = copy.deepcopy(model)
    whole = run(same, range(6), tuning.PositionTracker(same))
    path = tmp_path / "track.jsonl"
    run(model, range(3), tuning.PositionTracker(model, path))
    state = copy.deepcopy(model.state_dict())
    run(model, [3, 4], tuning.PositionTracker(model, path))
    with path.open("a") as file:
        file.write('{"format": 1, "step": 5, "posi')  # the run was killed here
    model.load_state_dict(state)
    tracker = tuning.PositionTracker(model, path)
    tracker.continue_from(2)
    run(model, range(3, 6), tracker)
    assert tuning.read_track(path) == tuple(whole)


def test_another_run_does_not_append_to_a_file(model, tmp_path):
    path = tmp_path / "track.jsonl"
    run(model, range(4), tuning.PositionTracker(model, path))
    before = path.read_bytes()
    for step in (0, 3):
        with pytest.raises(
            dcls_convert.DclsConvertError, match=r"jsonl: step \d is not above the la"
        ):
            tuning.PositionTracker(model, path).update(step)
    assert path.read_bytes() == before
    # A run that was resumed without its last positions has one unknown speed.
    (record,) = run(model, [4], tuning.PositionTracker(model, path))
    assert record.positions[0].speed is None
    assert [record.step for record in tuning.read_track(path)] == [0, 1, 2, 3, 4]


def test_errors_name_the_file_that_cannot_be_read_or_written(model, tmp_path):
    path = tmp_path / "track.jsonl"
    with pytest.raises(dcls_convert.CheckpointError, match="cannot be read"):
        tuning.read_track(path)
    with pytest.raises(dcls_convert.CheckpointError, match=f"{tmp_path}: cannot be written"):
        tuning.PositionTracker(model, tmp_path).update(0)
    run(model, range(3), tuning.PositionTracker(model, path))
    lines = path.read_text().splitlines(keepends=True)
    newer = lines[1].replace('"format":1', '"format":2')
    for broken in (
        "\n",
        "{}\n",
        lines[1].replace("speed", "sped"),
        lines[1].replace('"step":1', '"step":"1"'),
        newer,
    ):
        path.write_text(lines[0] + broken + lines[2])
        with pytest.raises(dcls_convert.CheckpointError, match=r"track\.jsonl: line 2: ") as caught:
            tuning.read_track(path)
        assert "\n" not in str(caught.value)
    assert "install a newer one" in str(caught.value)


@pytest.mark.parametrize("step", [2, 1, True, 3.0])
def test_steps_must_increase(model, step):
    tracker = tuning.PositionTracker(model)
    tracker.update(2)
    with pytest.raises(dcls_convert.DclsConvertError, match="step"):
        tracker.update(step)


def test_tensorboard_shows_the_values_of_the_record(model, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    records = run(model, [0, 5], tuning.PositionTracker(model))
    with SummaryWriter(tmp_path) as writer:
        for record in records:
            tuning.show_in_tensorboard(writer, record)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    row = records[1].positions[0]
    (speed,) = events.Scalars("speed/one.positions")  # the first record has no speed
    assert (speed.step, speed.value) == (5, pytest.approx(row.speed))
    assert "mean_sigma/two.positions" in events.Tags()["scalars"]
    assert "mean_sigma/one.positions" not in events.Tags()["scalars"]
    drawn = events.Histograms("positions/one.positions/axis1")[-1].histogram_value
    counts = row.histograms[1]
    bucket_counts = {
        limit - 0.5: n for limit, n in zip(drawn.bucket_limit, drawn.bucket, strict=True) if n
    }
    assert bucket_counts == {cell: n for cell, n in zip(range(-3, 4), counts, strict=True) if n}
    assert (drawn.min, drawn.max, drawn.num) == (-3.5, 3.5, sum(counts))
    assert drawn.sum == sum(cell * n for cell, n in bucket_counts.items())
