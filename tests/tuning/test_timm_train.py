"""timm's train.py runs unchanged, and positions are trained as in the paper."""

import argparse
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from dcls_convert import DclsConv2d, tuning
from dcls_convert.errors import DclsConvertError
from dcls_convert.networks.position_parameters import position_parameters
from dcls_convert.tuning import timm_train

from .models import converted, named


def creating(**options):
    """Return the replacement of timm's create_optimizer_v2 under these command-line options."""
    defaults = {"position_lr_scale": 5.0, "repulsive_loss_from": None, "track": None}
    return partial(
        timm_train.create_optimizer,
        create_optimizer_v2,
        argparse.Namespace(**{**defaults, **options}),
    )


def groups_of(optimizer, model):
    groups = named(model, optimizer.param_groups)
    settings = [(group["lr"], group.get("lr_scale"), group["weight_decay"]) for group in groups]
    return {
        name: group_settings
        for group, group_settings in zip(groups, settings, strict=True)
        for name in group["params"]
    }


LAYER_DECAY = {"layer_decay": 0.7, "layer_decay_min_scale": 0.2}


@pytest.mark.parametrize(
    "options",
    [{"layer_decay_min_scale": 0.0}, LAYER_DECAY, {"filter_bias_and_bn": False}, {"opt": "muon"}],
)
def test_all_parameters_except_positions_are_grouped_as_by_timm(options):
    tiny = converted("tied")
    options = {"opt": "adamw", "lr": 0.001, "weight_decay": 0.05, **options}
    stock = groups_of(create_optimizer_v2(tiny, **options), tiny)
    optimizer = creating()(tiny, **options)
    create_scheduler_v2(optimizer, num_epochs=2)
    groups = groups_of(optimizer, tiny)
    assert groups.keys() == stock.keys()
    depths = [
        pytest.approx(max(options.get("layer_decay", 1) ** depth, 0.2)) for depth in range(20)
    ]
    for name, (lr, scale, weight_decay) in groups.items():
        if "positions" in name:
            assert (weight_decay, lr) == (0, pytest.approx(0.001 * scale))
            assert scale / 5 in depths
        else:
            assert (scale, weight_decay) == stock[name][1:]


def test_given_groups_and_unconverted_models_are_left_to_timm():
    plain = converted("no dcls")
    tiny = converted("tied")

    def assert_same_groups(model, *arguments, **options):
        optimizers = [make(*arguments, **options) for make in (creating(), create_optimizer_v2)]
        ours, timms = (groups_of(optimizer, model) for optimizer in optimizers)
        assert ours == timms

    assert_same_groups(plain, plain, "adamw", 0.1, 0.05)
    assert_same_groups(tiny, [*tiny.parameters()], "sgd", 0.1)
    assert_same_groups(
        tiny, tiny, "sgd", 0.1, param_group_fn=lambda model: [{"params": [*model.parameters()]}]
    )


# The repulsive loss, clamping and records of positions.

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
        for parameter in position_parameters(model):
            parameter.tensor.mul_(4)
    return model.double().train()


def train_one_epoch(
    epoch, model, optimizer, scaler, step=lambda loss, epoch: loss, after=lambda: None
):
    """Train for one step, with two batches."""
    images = torch.randn(
        4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(epoch)
    )
    for batch in images.split(2):
        loss = torch.nn.functional.cross_entropy(model(batch), torch.tensor([0, 1]))
        scaler.scale(step(loss, epoch) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after()


@pytest.fixture
def script(monkeypatch):
    """A stand-in for the module of the running script, with a `train_one_epoch`."""
    module = types.ModuleType("__main__")
    module.train_one_epoch = train_one_epoch
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize(
    "options", [{"opt": "lookahead_adamw"}, {"opt": "adamw", "fused": True}], ids=str
)
def test_steps_equal_those_with_clamping_and_the_repulsive_loss_added_to_the_loss(
    options, script, tmp_path, caplog
):
    options = {"lr": 0.05, "weight_decay": 0.05, **options}
    reference = at_the_border()
    model = at_the_border()
    track = tmp_path / "positions.jsonl"

    def step(loss, epoch):
        return loss + tuning.repulsive_loss(reference) ** 2 if epoch >= 1 else loss

    groups = partial(tuning.param_groups, weight_decay=0.05)
    plain = create_optimizer_v2(reference, **options, param_group_fn=groups)
    optimizer = creating(repulsive_loss_from=1, track=str(track))(model, **options)
    initial = [parameter.tensor.detach().clone() for parameter in position_parameters(model)]
    scalers = [
        torch.amp.GradScaler("cpu", enabled="fused" in options, init_scale=1024.0) for _ in range(2)
    ]
    caplog.set_level("INFO")
    for epoch in range(3):
        train_one_epoch(
            epoch, reference, plain, scalers[0], step, partial(tuning.clamp_positions_, reference)
        )
        script.train_one_epoch(epoch, model, optimizer=optimizer, scaler=scalers[1])
        for parameter in position_parameters(model):
            assert parameter.tensor.abs().max() <= 4
    for (name, tensor), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(
            tensor, expected, rtol=0, atol=FLOAT64_ATOL, msg=lambda m, n=name: f"{n}: {m}"
        )
    pairs = zip(position_parameters(model), initial, strict=True)
    assert any((parameter.tensor - before).abs().max() > 0.1 for parameter, before in pairs)
    expected_rows = tuning.PositionTracker(model).update(0).positions
    records = tuning.read_track(track)
    assert [record.step for record in records] == [0, 1, 2]
    assert records[-1].positions[0].histograms == expected_rows[0].histograms
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["off", "on", "on"]


def test_a_resumed_run_continues_the_record_and_another_run_is_refused(script, tmp_path):
    track = tmp_path / "positions.jsonl"
    trained = []

    def start(epochs):
        script.train_one_epoch = lambda epoch, model: trained.append(epoch)
        model = at_the_border()
        creating(track=str(track))(model, "sgd", lr=0.1)
        for epoch in epochs:
            script.train_one_epoch(epoch, model)

    start([0, 1, 2])  # killed before the state of epoch 2 was saved
    start([2, 3])
    records = tuning.read_track(track)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert all(record.positions[0].speed == 0 for record in records[1:])
    with pytest.raises(DclsConvertError, match=r"--track .*jsonl: exists; name a new file"):
        start([0])
    assert trained == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("options", [{"repulsive_loss_from": 0}, {"track": "positions.jsonl"}])
def test_options_that_need_dcls_layers_or_epochs_are_refused_without(options, tiny, script):
    for model in (tiny, at_the_border()):
        with pytest.raises(
            DclsConvertError, match=r"need a model with DCLS layers, and a train_one_epoch\(epoch"
        ):
            creating(**options)(model, "sgd", lr=0.1)
        vars(script).pop("train_one_epoch", None)


SCRIPT = """
import dcls_convert, helper_beside
from timm.optim import create_optimizer_v2
if __name__ == "__main__":
    model = dcls_convert.DclsConv2d(3, 4, kernel_count=3, dilated_kernel_size=5)
    helper_beside.optimizer = create_optimizer_v2(model, opt="adamw", lr=0.001)
"""


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """A function that runs the program on a script that makes an optimizer.

    It returns the arguments that the script received, and the optimizer.
    """
    monkeypatch.chdir(tmp_path)
    Path("scripts").mkdir()
    Path("scripts/helper_beside.py").touch()
    Path("scripts/train.py").write_text(SCRIPT)

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["timm_train", *arguments])
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(timm.optim, "create_optimizer_v2", create_optimizer_v2)
            timm_train.main()
            return sys.argv, sys.modules.pop("helper_beside").optimizer

    return run


def test_the_script_gets_its_arguments_and_positions_get_separate_groups(run_script):
    arguments, optimizer = run_script(
        "--position-lr-scale", "3", "scripts/train.py", "--epochs", "3", "--track", "x"
    )
    assert arguments == ["scripts/train.py", "--epochs", "3", "--track", "x"]
    assert {group.get("lr_scale", 1) for group in optimizer.param_groups} == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--track", "nowhere/positions.jsonl", __file__],
            "nowhere/positions.jsonl: there is no folder",
        ),
        (["nowhere/train.py"], "nowhere/train.py: no such script"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["timm_train", *arguments])
    with pytest.raises(SystemExit) as stopped:
        timm_train.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
