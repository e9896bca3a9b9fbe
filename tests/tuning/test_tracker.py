"""Records of positions in training: their contents, warnings about optimizers, and reading them
back.
"""

import json
import math
import os
import warnings

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

import dcls_convert
from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.layers.position_parameters import position_parameters
from dcls_convert.layers.position_statistics import border_share

from .models import converted


@pytest.fixture
def model():
    """Two layers with different windows; the second has a dense axis and sigmas."""
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


def test_a_record_has_border_and_spread_of_every_tensor(model):
    (record,) = run(model, [3], tuning.PositionTracker(model))
    assert record.step == 3
    assert list(record.positions) == ["one.positions", "two.positions"]
    for name, size in (("one", (4, 7)), ("two", (9,))):
        positions = model[name].positions.detach()
        row = record.positions[f"{name}.positions"]
        assert row.border_share == border_share(positions, size)
        assert row.spread == pytest.approx(positions.square().mean().sqrt().item())


def test_speed_is_the_mean_absolute_change_of_a_coordinate_per_step(model):
    tracker = tuning.PositionTracker(model)
    before = {
        parameter.name: parameter.tensor.detach().clone().double()
        for parameter in position_parameters(model)
    }
    assert [row.speed for row in tracker.update(10).positions.values()] == [None, None]
    assert [row.speed for row in tracker.update(11).positions.values()] == [0.0, 0.0]
    (record,) = run(model, [14], tracker)
    for name, row in record.positions.items():
        after = model.get_parameter(name).detach().double()
        mean_move = (after - before[name]).abs().mean().item()
        assert row.speed == pytest.approx(mean_move / 3, rel=1e-6)
        assert row.speed > 0


def lr_ratios(tracker, step) -> list[float | None]:
    return [row.lr_ratio for row in tracker.update(step).positions.values()]


def test_a_record_has_the_rate_of_positions_relative_to_that_of_weights(model):
    assert lr_ratios(tuning.PositionTracker(model), 0) == [None, None]
    optimizer = torch.optim.AdamW(tuning.param_groups(model, lr=1e-3))
    tracker = tuning.PositionTracker(model, optimizer=optimizer)
    assert lr_ratios(tracker, 0) == pytest.approx([5, 5])
    moving = {"params": [model["one"].positions, model["two"].weight], "lr": 0.3}
    weights = {"params": [model["one"].weight], "lr": torch.tensor(0.5)}
    optimizer = torch.optim.SGD([moving, weights])  # without the positions of "two"
    tracker = tuning.PositionTracker(model, optimizer=optimizer)
    assert lr_ratios(tracker, 0) == [pytest.approx(0.6), None]
    optimizer.param_groups[1]["lr"] = 0.0  # the end of a schedule
    assert lr_ratios(tracker, 1) == [None, None]


def test_a_scheduler_that_sets_one_rate_for_all_groups_is_warned_of_once(model):
    optimizer = torch.optim.AdamW(tuning.param_groups(model, lr=1e-3))
    tracker = tuning.PositionTracker(model, optimizer=optimizer)
    tracker.update(0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)
    with pytest.warns(UserWarning, match="now 1 times.* was 5 times before; .*One") as caught:
        tracker.update(1)
    assert caught[0].filename == __file__
    assert lr_ratios(tracker, 2) == [1, 1]


def at_all_parameters(model):
    return torch.optim.AdamW(model.parameters())


def without_decay(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_the_default_decay(model):
    """Positions have a group of their own, but AdamW decays every group."""
    names = tuning.no_weight_decay(model)
    positions = [model.get_parameter(name) for name in names]
    weights = [one for name, one in model.named_parameters() if name not in names]
    return torch.optim.AdamW([{"params": weights}, {"params": positions, "lr": 5e-3}])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            at_all_parameters,
            "learn no faster than weights and decay towards the window's centre "
            "(weight_decay=0.01)",
        ),
        (without_decay, "learn no faster than weights"),
        (with_the_default_decay, "decay towards the window's centre (weight_decay=0.01)"),
    ],
)
def test_the_first_record_warns_of_an_optimizer_that_treats_positions_like_weights(make, problem):
    model = converted("tied")
    tracker = tuning.PositionTracker(model, optimizer=make(model))
    with pytest.warns(UserWarning, match="^positions ") as caught:
        tracker.update(0)
    assert [str(warning.message) for warning in caught] == [
        f"positions {problem}; give the optimizer tuning.param_groups(model, lr=..., "
        "weight_decay=...) instead of model.parameters()"
    ]
    assert caught[0].filename == __file__
    tracker.update(1)


def groups_of_the_paper(model):
    return torch.optim.AdamW(tuning.param_groups(model, lr=1e-3))


def equal_rates_on_purpose(model):
    groups = tuning.param_groups(model, lr=1e-3, position_lr_scale=1.0, weight_decay=0.0)
    return torch.optim.AdamW(groups)


def groups_with_one_rate(model):
    """As docs/training.md has it for Prodigy and D-Adaptation."""
    return torch.optim.AdamW(tuning.param_groups(model), lr=1.0)


def timms_own_groups(model):
    return create_optimizer_v2(model, lr=1e-3, weight_decay=0.05)


def timms_groups_by_layer(model):
    return create_optimizer_v2(model, lr=1e-3, weight_decay=0.05, layer_decay=0.7)


def our_groups_by_timm(model):
    return create_optimizer_v2(model, lr=1e-3, param_group_fn=tuning.param_groups)


def frozen_positions(model):
    for name in tuning.no_weight_decay(model):
        model.get_parameter(name).requires_grad_(False)
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        groups_of_the_paper,
        equal_rates_on_purpose,
        groups_with_one_rate,
        timms_own_groups,
        timms_groups_by_layer,
        our_groups_by_timm,
        frozen_positions,
    ],
)
def test_documented_optimizers_are_not_warned_of(make):
    model = converted("tied")
    tracker = tuning.PositionTracker(model, optimizer=make(model))
    with warnings.catch_warnings(record=True, action="always") as caught:
        tracker.update(0)
    assert caught == []


def test_records_are_read_back_as_written(model, tmp_path):
    path = tmp_path / "track.jsonl"
    tracker = tuning.PositionTracker(model, path)
    records = run(model, range(3), tracker)
    with torch.no_grad():
        model["one"].positions[0, 0, 0, 0] = math.nan
    records.append(tracker.update(3))
    assert records[-1].positions["one.positions"].spread is None
    assert records[-1].positions["one.positions"].speed is None
    with path.open("a") as file:
        file.write('{"step": 4, "posi')  # the run was killed here
    assert tuning.read_track(path) == tuple(records)


def test_a_resumed_run_replaces_the_records_of_the_steps_that_come_again(model, tmp_path):
    path = tmp_path / "track.jsonl"
    killed = run(model, range(6), tuning.PositionTracker(model, path))
    resumed = run(model, [3, 4], tuning.PositionTracker(model, path))  # from the state of step 2
    assert tuning.read_track(path) == (*killed[:3], *resumed)


def test_a_record_states_its_unit_and_those_of_a_file_agree(model, tmp_path):
    path = tmp_path / "track.jsonl"
    run(model, range(2), tuning.PositionTracker(model, path, unit="epoch"))
    assert {record.unit for record in tuning.read_track(path)} == {"epoch"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["unit"]
    old = tmp_path / "old.jsonl"
    old.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert {record.unit for record in tuning.read_track(old)} == {"step"}
    message = r"track\.jsonl: line 3 counts steps, the lines before it epochs; record each training"
    with pytest.raises(dcls_convert.CheckpointError, match=message):
        tuning.PositionTracker(model, path)
    path.write_text(path.read_text() + json.dumps(lines[1] | {"step": 2}) + "\n")
    with pytest.raises(dcls_convert.CheckpointError, match=message):
        tuning.read_track(path)
    with pytest.raises(dcls_convert.DclsConvertError, match=r"unit='hour' must be 'step' or 'epo"):
        tuning.PositionTracker(model, unit="hour")


def test_errors_name_the_file_that_cannot_be_read_or_written(model, tmp_path):
    path = tmp_path / "track.jsonl"
    with pytest.raises(dcls_convert.CheckpointError, match="cannot be read"):
        tuning.read_track(path)
    for place in (tmp_path, tmp_path / "missing" / "track.jsonl"):
        with pytest.raises(dcls_convert.CheckpointError, match=f"{place}: cannot be written"):
            tuning.PositionTracker(model, place)
    run(model, range(3), tuning.PositionTracker(model, path))
    lines = path.read_text().splitlines(keepends=True)
    for broken in (
        "\n",
        lines[1].replace("speed", "sped"),
        lines[1].replace('"step":1', '"step":"1"'),
    ):
        path.write_text(lines[0] + broken + lines[2])
        message = r"track\.jsonl: line 2 is not a record of a PositionTracker: "
        with pytest.raises(dcls_convert.CheckpointError, match=message):
            tuning.read_track(path)


@pytest.mark.parametrize("step", [2, 3.0])
def test_steps_are_larger_integers(model, step):
    tracker = tuning.PositionTracker(model)
    tracker.update(2)
    with pytest.raises(dcls_convert.DclsConvertError, match="step"):
        tracker.update(step)


def test_a_record_that_a_killed_run_has_left_half_written_is_replaced(model, tmp_path):
    path = tmp_path / "positions.jsonl"
    tuning.PositionTracker(model, path).update(0)
    path.write_bytes(path.read_bytes() * 2)
    os.truncate(path, path.stat().st_size - 9)
    tuning.PositionTracker(model, path).update(1)
    assert [record.step for record in tuning.read_track(path)] == [0, 1]
