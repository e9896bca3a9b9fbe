"""examples/timm_train.py runs timm's train.py unchanged, and trains positions as in the paper."""

import argparse
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from dcls_convert import DclsConv2d, tuning

from .tuning.models import converted, named

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import timm_train


def creating(**options):
    """Return the replacement of timm's create_optimizer_v2 under these command-line options."""
    defaults = {"position_lr_scale": 5.0, "repulsive_loss_from": None, "track": None}
    namespace = argparse.Namespace(**{**defaults, **options})
    return partial(timm_train.create_optimizer, create_optimizer_v2, namespace)


def groups_of(optimizer, model):
    """Return the settings of each parameter, by its name."""
    settings = {}
    for group in named(model, optimizer.param_groups):
        for name in group["params"]:
            settings[name] = (group["lr"], group.get("lr_scale"), group["weight_decay"])
    return settings


@pytest.mark.parametrize(
    "options", [{"layer_decay": 0.7, "layer_decay_min_scale": 0.2}, {"opt": "muon"}], ids=str
)
def test_all_parameters_except_positions_are_grouped_as_by_timm(options):
    tiny = converted("tied")
    options = {"opt": "adamw", "lr": 0.001, "weight_decay": 0.05, **options}
    stock = groups_of(create_optimizer_v2(tiny, **options), tiny)
    optimizer = creating()(tiny, **options)
    create_scheduler_v2(optimizer, num_epochs=2)
    groups = groups_of(optimizer, tiny)
    assert groups.keys() == stock.keys()
    scales = [max(options.get("layer_decay", 1) ** depth, 0.2) for depth in range(20)]
    for name, (lr, scale, weight_decay) in groups.items():
        if "positions" in name:
            assert (weight_decay, lr) == (0, pytest.approx(0.001 * scale))
            assert scale / 5 in map(pytest.approx, scales)
        else:
            assert (scale, weight_decay) == stock[name][1:]


# Adam divides by roots of small gradients, which amplifies rounding errors of 1e-16.
FLOAT64_ATOL = 1e-9


def at_the_border():
    """A model with two layers, with many positions at the border of the window."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            DclsConv2d(c, 8, kernel_count=6, dilated_kernel_size=9, padding=4, stride=2)
            for c in (3, 8)
        ]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    with torch.no_grad():
        for positions in timm_train.positions_of(model):
            positions.mul_(4)
    return model.double().train()


def train_one_epoch(epoch, model, optimizer, scaler, change_loss=lambda loss: loss):
    """Train for one step, with two batches."""
    generator = torch.Generator().manual_seed(epoch)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator)
    for batch in images.split(2):
        loss = torch.nn.functional.cross_entropy(model(batch), torch.tensor([0, 1]))
        scaler.scale(change_loss(loss) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "options", [{"opt": "lookahead_adamw"}, {"opt": "adamw", "fused": True}], ids=str
)
def test_steps_equal_those_with_clamping_and_the_repulsive_loss_added_to_the_loss(
    options, monkeypatch, tmp_path
):
    script = types.ModuleType("__main__")
    script.train_one_epoch = train_one_epoch
    monkeypatch.setitem(sys.modules, "__main__", script)
    options = {"lr": 0.05, "weight_decay": 0.05, **options}
    reference = at_the_border()
    groups = partial(tuning.param_groups, weight_decay=0.05)
    plain = create_optimizer_v2(reference, **options, param_group_fn=groups)
    model = at_the_border()
    first_record = tuning.PositionTracker(model, unit="epoch").update(0)
    track = tmp_path / "positions.jsonl"
    optimizer = creating(repulsive_loss_from=1, track=track)(model, **options)
    is_fused = "fused" in options
    scalers = [torch.amp.GradScaler("cpu", enabled=is_fused, init_scale=1024.0) for _ in range(2)]

    def with_repulsion(loss):
        return loss + tuning.repulsive_loss(reference) ** 2

    for epoch in range(3):
        change = {"change_loss": with_repulsion} if epoch >= 1 else {}
        train_one_epoch(epoch, reference, plain, scalers[0], **change)
        tuning.clamp_positions_(reference)
        script.train_one_epoch(epoch, model, optimizer=optimizer, scaler=scalers[1])
        for positions in timm_train.positions_of(model):
            assert positions.abs().max() <= 4
    records = tuning.read_track(track)
    assert [(record.step, record.unit) for record in records] == [(n, "epoch") for n in range(4)]
    assert records[0] == first_record
    expected = dict(reference.named_parameters())
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=FLOAT64_ATOL)


def test_a_quoted_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["timm_train.py", "--track", "~/positions.jsonl", __file__]
    monkeypatch.setattr(sys, "argv", arguments)
    assert timm_train.parse_arguments().track == str(tmp_path / "positions.jsonl")
