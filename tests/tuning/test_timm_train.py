"""timm's train.py runs unchanged, and positions learn as the paper has it."""

import json
import subprocess
import sys
from functools import partial

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import dcls_convert
from dcls_convert.tuning import timm_train

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
parser.add_argument("--drop-path", type=float)
parser.add_argument("--output")
defaults = dict(opt="adamw", lr=1e-3, weight_decay=0.05, momentum=0.9, opt_eps=None, opt_betas=None, layer_decay=None,
    opt_kwargs={}, sched="cosine", epochs=2, warmup_epochs=0, decay_epochs=90, warmup_lr=1e-5, min_lr=0.0,
    cooldown_epochs=0, patience_epochs=10, decay_rate=0.1, sched_on_updates=False)
args = argparse.Namespace(**defaults, **vars(parser.parse_args()))

def main():
    model = create_model(args.model, pretrained=args.pretrained, in_chans=3, num_classes=args.num_classes,
        drop_rate=0.0, drop_path_rate=args.drop_path, drop_block_rate=None, global_pool=None, bn_momentum=None,
        bn_eps=None, scriptable=False, checkpoint_path="")
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
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


@pytest.fixture
def folder(tiny, tmp_path):
    report = dcls_convert.convert_(tiny, dilated_size=9, init="random")
    return dcls_convert.save_converted(tiny, report.plan, tmp_path / "tiny-dcls9")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(TRAIN_SCRIPT)
    (path.parent / "helper_beside.py").write_text("STEPS = 1\n")
    return path


def start(*arguments, cwd):
    command = [sys.executable, "-m", "dcls_convert.tuning.timm_train", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.processes
def test_the_script_trains_a_folder_and_its_checkpoint_becomes_a_folder(folder, script, tmp_path):

    (tmp_path / "out").mkdir()
    arguments = ["--model", f"local-dir:{folder}", "--pretrained", "--num-classes", "5", "--output", "out"]
    done = start("--position-lr-scale", "3", script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["argv"] == [str(script), *arguments]
    # After one of two epochs, cosine has halved the rate.
    rates = {round(group["lr"], 12): group for group in printed["groups"]}
    assert sorted({round(group["lr"], 12) for group in printed["groups"]}) == [0.0005, 0.0015]
    positions = sum(p.numel() for n, p in dcls_convert.load_converted(folder).named_parameters() if "positions" in n)
    assert rates[0.0015]["params"] == positions
    assert rates[0.0015]["decay"] == 0
    model = timm.create_model(
        f"local-dir:{folder}", num_classes=5, checkpoint_path=str(tmp_path / "out" / "model_best.pth.tar")
    )
    tuned = dcls_convert.save_converted(model, folder, tmp_path / "tuned-dcls9")
    loaded = timm.create_model(f"local-dir:{tuned}", pretrained=True)
    stored = torch.load(tmp_path / "out" / "model_best.pth.tar", weights_only=False)["state_dict_ema"]
    assert loaded.num_classes == 5
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.state_dict().items())


def groups_of(optimizer, model):
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group.get("lr_scale"), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("options", [{}, {"layer_decay": 0.7}, {"filter_bias_and_bn": False}, {"opt": "muon"}])
def test_all_but_positions_is_grouped_as_by_timm(tiny, options):
    dcls_convert.convert_(tiny, dilated_size=9, init="random")
    options = {"opt": "adamw", "lr": 0.001, "weight_decay": 0.05, **options}
    stock = groups_of(create_optimizer_v2(tiny, **options), tiny)
    with timm_train.position_groups_in_timm():
        ours = timm.optim.create_optimizer_v2(tiny, **options)
    assert timm.optim.create_optimizer_v2 is create_optimizer_v2
    create_scheduler_v2(ours, num_epochs=2)
    found = groups_of(ours, tiny)
    assert found.keys() == stock.keys()
    decay = options.get("layer_decay")
    for name, (lr, scale, weight_decay) in found.items():
        if "positions" in name:
            assert weight_decay == 0
            assert lr == pytest.approx(0.001 * scale)
            assert scale == 5 if decay is None else scale / 5 in [pytest.approx(decay**depth) for depth in range(20)]
        else:
            assert (scale, weight_decay) == stock[name][1:]


@pytest.mark.parametrize("converted", [True, False])
def test_what_is_grouped_already_and_plain_models_pass_through(tiny, converted):
    if converted:
        dcls_convert.convert_(tiny, dilated_size=9, init="random")
    create = timm_train.with_position_groups(create_optimizer_v2)
    calls = [lambda make: make(tiny.parameters(), opt="sgd", lr=0.1)]
    calls.append(lambda make: make(tiny, "sgd", 0.1, param_group_fn=lambda m: [{"params": list(m.parameters())}]))
    if not converted:
        calls.append(partial(lambda make: make(tiny, "adamw", 0.1, 0.05)))
    for call in calls:
        assert groups_of(call(create), tiny) == groups_of(call(create_optimizer_v2), tiny)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the script to run"),
        (["--position-lr-scale"], "--position-lr-scale"),
        (["--position-lr-scale=x", "train.py"], "'x' must be a number"),
        (["--repulsive-loss-from", "-1", "train.py"], "--repulsive-loss-from"),
        (["--repulsive-loss-from", "1.5", "train.py"], "'1.5' must be the number of an epoch"),
        (["--repulsive-los", "1", "train.py"], "--repulsive-los"),
        (["--auto-resume", __file__], "--auto-resume needs the script's --experiment NAME"),
        (["nowhere/train.py"], "nowhere/train.py: no such script"),
    ],
)
def test_mistakes_are_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["timm_train", *arguments])
    with pytest.raises(SystemExit) as stopped:
        timm_train.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
