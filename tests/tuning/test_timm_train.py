"""timm's train.py runs unchanged, and positions learn as the paper has it."""

import argparse
import json
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import dcls_convert
from dcls_convert import tuning
from dcls_convert.errors import DclsConvertError
from dcls_convert.networks.positions import position_parameters
from dcls_convert.tuning import timm_train

from ..conftest import TINY

# What train.py of timm calls, in its manner: names imported at the top, the rest by keywords.
TRAIN_SCRIPT = """
import argparse, json, sys
import torch
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import CheckpointSaver, ModelEmaV2
from helper_beside import STEPS

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--pretrained", action="store_true")
parser.add_argument("--num-classes", type=int)
parser.add_argument("--output")
defaults = dict(opt="adamw", lr=1e-3, weight_decay=0.05, momentum=0.9, sched="cosine", epochs=2, warmup_epochs=0,
    decay_epochs=90, warmup_lr=1e-5, min_lr=0.0, cooldown_epochs=0, patience_epochs=10, decay_rate=0.1,
    sched_on_updates=False)
args = argparse.Namespace(**defaults, **vars(parser.parse_args()))

def main():
    model = create_model(args.model, pretrained=args.pretrained, num_classes=args.num_classes, checkpoint_path="")
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    model_ema = ModelEmaV2(model, decay=0.5)
    scheduler, epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(args), updates_per_epoch=1)
    saver = CheckpointSaver(model=model, optimizer=optimizer, args=args, model_ema=model_ema,
        checkpoint_dir=args.output, recovery_dir=args.output, max_history=1)
    for step in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model.train()(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update(model)
        scheduler.step(step + 1)
        saver.save_checkpoint(step, metric=float(step))
    print(json.dumps({"argv": sys.argv, "groups": [
        {"lr": group["lr"], "decay": group["weight_decay"], "params": sum(p.numel() for p in group["params"])}
        for group in optimizer.param_groups]}))

if __name__ == "__main__":
    main()
"""


@pytest.mark.processes
def test_the_script_trains_a_folder_and_its_checkpoint_becomes_a_folder(tiny, tmp_path):
    report = dcls_convert.convert_(tiny, dilated_size=9, init="random")
    folder = dcls_convert.save_converted(tiny, report.plan, tmp_path / "tiny-dcls9")
    script = tmp_path / "scripts" / "train.py"
    for path in (script.parent, tmp_path / "out"):
        path.mkdir()
    script.write_text(TRAIN_SCRIPT)
    (script.parent / "helper_beside.py").write_text("STEPS = 1\n")
    arguments = ["--model", f"local-dir:{folder}", "--pretrained", "--num-classes", "5", "--output", "out"]
    command = [sys.executable, "-m", "dcls_convert.tuning.timm_train", "--position-lr-scale", "3", script, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["argv"] == [str(script), *arguments]
    # After one of two epochs, cosine has halved the rate.
    rates = {round(group["lr"], 12): group for group in printed["groups"]}
    assert sorted(rates) == [0.0005, 0.0015]
    positions = sum(p.numel() for n, p in tiny.named_parameters() if "positions" in n)
    assert (rates[0.0015]["params"], rates[0.0015]["decay"]) == (positions, 0)
    best = str(tmp_path / "out" / "model_best.pth.tar")
    model = timm.create_model(f"local-dir:{folder}", num_classes=5, checkpoint_path=best)
    tuned = dcls_convert.save_converted(model, folder, tmp_path / "tuned-dcls9")
    loaded = timm.create_model(f"local-dir:{tuned}", pretrained=True)
    stored = torch.load(best, weights_only=False)["state_dict_ema"]
    assert loaded.num_classes == 5
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.state_dict().items())


def creating(**options):
    """What stands for timm's create_optimizer_v2 under these options of the command line."""
    defaults = {"position_lr_scale": 5.0, "repulsive_loss_from": None, "track": None}
    return partial(timm_train.create_optimizer, create_optimizer_v2, argparse.Namespace(**{**defaults, **options}))


def groups_of(optimizer, model):
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group.get("lr_scale"), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


LAYER_DECAY = {"layer_decay": 0.7, "layer_decay_min_scale": 0.2}


@pytest.mark.parametrize(
    "options", [{"layer_decay_min_scale": 0.0}, LAYER_DECAY, {"filter_bias_and_bn": False}, {"opt": "muon"}]
)
def test_all_but_positions_is_grouped_as_by_timm(tiny, options):
    dcls_convert.convert_(tiny, dilated_size=9, init="random")
    options = {"opt": "adamw", "lr": 0.001, "weight_decay": 0.05, **options}
    stock = groups_of(create_optimizer_v2(tiny, **options), tiny)
    optimizer = creating()(tiny, **options)
    create_scheduler_v2(optimizer, num_epochs=2)
    groups = groups_of(optimizer, tiny)
    assert groups.keys() == stock.keys()
    depths = [pytest.approx(max(options.get("layer_decay", 1) ** depth, 0.2)) for depth in range(20)]
    for name, (lr, scale, weight_decay) in groups.items():
        if "positions" in name:
            assert (weight_decay, lr) == (0, pytest.approx(0.001 * scale))
            assert scale / 5 in depths
        else:
            assert (scale, weight_decay) == stock[name][1:]


@pytest.mark.parametrize("converted", [True, False])
def test_what_is_grouped_already_and_plain_models_pass_through(tiny, converted):
    if converted:
        dcls_convert.convert_(tiny, dilated_size=9, init="random")
    calls = [lambda make: make(tiny.parameters(), opt="sgd", lr=0.1)]
    calls.append(lambda make: make(tiny, "sgd", 0.1, param_group_fn=lambda m: [{"params": list(m.parameters())}]))
    if not converted:
        calls.append(lambda make: make(tiny, "adamw", 0.1, 0.05))
    for call in calls:
        assert groups_of(call(creating()), tiny) == groups_of(call(create_optimizer_v2), tiny)


# The repulsive loss, clamping and the record.

FLOAT64_ATOL = 1e-9  # Adam divides by roots of small gradients, which amplifies rounding (1e-16)
LIMIT = 4  # cells, of a window of 9


def at_the_border():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(TINY, num_classes=3, ls_init_value=0.5)
        dcls_convert.convert_(model, dilated_size=9, init="random")
    with torch.no_grad():
        for one in position_parameters(model):
            one.tensor.mul_(4)
    return model.double().train()


def train_one_epoch(epoch, model, optimizer, scaler, step=lambda loss, epoch: loss, after=lambda: None):
    """Two batches, one step."""
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(epoch))
    for batch in images.split(2):
        loss = torch.nn.functional.cross_entropy(model(batch), torch.tensor([0, 1]))
        scaler.scale(step(loss, epoch) / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after()


@pytest.fixture
def script(monkeypatch):
    """The module of the running script, with a `train_one_epoch`."""
    module = types.ModuleType("__main__")
    module.train_one_epoch = train_one_epoch
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.parametrize("options", [{"opt": "lookahead_adamw"}, {"opt": "adamw", "fused": True}], ids=str)
def test_steps_are_those_with_the_repulsive_loss_in_the_loss_and_clamping(options, script, tmp_path, caplog):
    options = {"lr": 0.05, "weight_decay": 0.05, **options}
    reference, model, track = at_the_border(), at_the_border(), tmp_path / "positions.jsonl"

    def step(loss, epoch):
        return loss + tuning.repulsive_loss(reference) ** 2 if epoch >= 1 else loss

    groups = partial(tuning.param_groups, weight_decay=0.05)
    plain = create_optimizer_v2(reference, **options, param_group_fn=groups)
    optimizer = creating(repulsive_loss_from=1, track=str(track))(model, **options)
    start = [one.tensor.detach().clone() for one in position_parameters(model)]
    scalers = [torch.amp.GradScaler("cpu", enabled="fused" in options, init_scale=1024.0) for _ in range(2)]
    caplog.set_level("INFO")
    for epoch in range(3):
        train_one_epoch(epoch, reference, plain, scalers[0], step, partial(tuning.clamp_positions_, reference))
        script.train_one_epoch(epoch, model, optimizer=optimizer, scaler=scalers[1])
        assert all(one.tensor.abs().max() <= LIMIT for one in position_parameters(model))
    for (name, tensor), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=FLOAT64_ATOL, msg=lambda m, n=name: f"{n}: {m}")
    moved = zip(position_parameters(model), start, strict=True)
    assert any((one.tensor - before).abs().max() > 0.1 for one, before in moved)
    now = tuning.PositionTracker(model).update(0).positions
    records = tuning.read_track(track)
    assert [record.step for record in records] == [0, 1, 2]
    assert records[-1].positions[0].histograms == now[0].histograms
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["off", "on", "on"]


@pytest.mark.parametrize("options", [{"repulsive_loss_from": 0}, {"track": "positions.jsonl"}])
def test_what_cannot_be_had_is_refused(options, tiny, script):
    with pytest.raises(DclsConvertError, match="no model with DCLS layers"):
        creating(**options)(tiny, "sgd", lr=0.1)
    del script.train_one_epoch
    with pytest.raises(DclsConvertError, match=r"train_one_epoch\(epoch"):
        creating(**options)(at_the_border(), "sgd", lr=0.1)


@pytest.mark.parametrize("output", [[], ["--output", "runs"], ["--output=runs"]])
def test_a_run_resumes_from_its_last_checkpoint_if_there_is_one(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", "resnet18", *output, "--experiment", "mine", "--epochs", "3"]
    assert timm_train.resumed(arguments) == arguments
    last = Path("runs" if output else "output/train", "mine", "last.pth.tar")
    last.parent.mkdir(parents=True)
    last.touch()
    assert timm_train.resumed(arguments) == [*arguments, "--resume", str(last)]
    chosen = [*arguments, "--resume", "other.pth.tar"]
    assert timm_train.resumed(chosen) == chosen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repulsive-los", "1", "train.py"], "--repulsive-los"),
        (["--auto-resume", __file__], "--auto-resume needs the script's --experiment NAME"),
        (["--track", "nowhere/positions.jsonl", __file__], "nowhere/positions.jsonl: there is no folder"),
        (["nowhere/train.py"], "nowhere/train.py: no such script"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["timm_train", *arguments])
    with pytest.raises(SystemExit) as stopped:
        timm_train.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
