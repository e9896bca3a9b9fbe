"""Run timm's own train.py on converted models:

    python -m dcls_convert.tuning.timm_train [OPTIONS] train.py ARGUMENTS...

What the script cannot do itself: timm loads converted folders, since this package is imported;
positions get parameter groups of their own (`tuning.param_groups`) and are clamped after every
step; and what the options name.
"""

import argparse
import importlib
import logging
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DclsConvertError
from ..networks.positions import clamp_positions_, position_parameters
from ..options import POSITION_LR_SCALE
from .param_groups import param_groups
from .repulsion import repulsive_loss
from .tracker import PositionTracker, is_first_rank

LAST = "last.pth.tar"  # train.py writes it after every epoch
# Arguments of timm's create_optimizer_v2 that timm's functions for parameter groups have too, by
# the names there.
GROUPING = {
    name: name
    for name in ("weight_decay", "layer_decay", "fallback_list", "fallback_no_weight_decay")
}
GROUPING |= {"filter_bias_and_bn": "weight_decay_exclude_1d"}
LAYER_GROUPING = {"layer_decay_min_scale": "min_scale", "layer_decay_no_opt_scale": "no_opt_scale"}


def create_optimizer(
    timms: Callable[..., Any], options: argparse.Namespace, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """timm's optimizer, with positions in groups of their own, clamped at every step, and repelled
    if asked for."""
    by_epochs = options.repulsive_loss_from is not None or options.track is not None
    converted = isinstance(model, nn.Module) and len(position_parameters(model)) > 0
    if by_epochs and not (converted and hasattr(sys.modules["__main__"], "train_one_epoch")):
        needs = "need a model with DCLS layers, and a train_one_epoch(epoch, ...) in the script"
        raise DclsConvertError(f"--repulsive-loss-from and --track {needs}")
    if converted and kwargs.get("param_group_fn") is None:
        names = GROUPING if kwargs.get("layer_decay") is None else GROUPING | LAYER_GROUPING
        grouping = {"weight_decay": 0.0} | {
            ours: kwargs[name] for name, ours in names.items() if name in kwargs
        }
        kwargs["param_group_fn"] = partial(
            param_groups, position_lr_scale=options.position_lr_scale, **grouping
        )
    optimizer = timms(model, *args, **kwargs)
    if converted:
        optimizer.register_step_post_hook(lambda *_: clamp_positions_(model))
    if by_epochs:
        follow_epochs_(model, optimizer, options)
    return optimizer


def follow_epochs_(model: nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
    """Let the script's `train_one_epoch(epoch, ...)` repel positions from an epoch on, and record
    them at its end."""
    script = vars(sys.modules["__main__"])
    train = script["train_one_epoch"]
    moving = [
        one.tensor for one in position_parameters(model, "positions") if one.tensor.requires_grad
    ]
    tracker = None if options.track is None else PositionTracker(model, options.track)
    repelling = False

    def train_one_epoch(epoch: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal repelling
        if options.repulsive_loss_from is not None:
            repelling = epoch >= options.repulsive_loss_from
            loss = repulsive_loss(model).item()
            if is_first_rank():
                state = "on" if repelling else "off"
                logging.getLogger(__name__).info(
                    f"epoch {epoch}: repulsive loss {loss:.3g}, {state}"
                )
        result = train(epoch, *args, **kwargs)
        if tracker is not None:
            tracker.update(epoch)
        return result

    def repel(stepping: Any, *_: Any) -> None:
        # As if the square were in the loss: it depends on positions alone, so all processes add the
        # same, and once where gradients are accumulated. Clipping of gradients has come before.
        if repelling and moving:
            scale = getattr(
                stepping, "grad_scale", None
            )  # of AMP; fused optimizers divide by it themselves
            for tensor, gradient in zip(
                moving, torch.autograd.grad(repulsive_loss(model) ** 2, moving), strict=True
            ):
                gradient = gradient if scale is None else gradient * scale
                tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)

    optimizer.register_step_pre_hook(repel)
    script["train_one_epoch"] = train_one_epoch


def main() -> None:
    """Run `[OPTIONS] SCRIPT ARGUMENTS...` as `python SCRIPT ARGUMENTS...` would."""
    parser = argparse.ArgumentParser("python -m dcls_convert.tuning.timm_train", allow_abbrev=False)
    add = partial(parser.add_argument, metavar="X")
    add(
        "--position-lr-scale",
        type=float,
        default=POSITION_LR_SCALE,
        help="times the learning rate for positions",
    )
    add(
        "--repulsive-loss-from",
        type=int,
        help="epoch from which the square of the repulsive loss is added",
    )
    add(
        "--track",
        type=Path,
        metavar="FILE",
        help="append a record of all positions after every epoch",
    )
    parser.add_argument(
        "--auto-resume", action="store_true", help=f"resume from the run's {LAST}, if there is one"
    )
    add("script", type=Path, metavar="SCRIPT.py", help="timm's train.py, from its repository")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="for the script")
    options = parser.parse_args()
    try:
        if not options.script.is_file():
            raise DclsConvertError(
                f"{options.script}: no such script; timm's train.py is in its repository"
            )
        if options.track is not None and not options.track.parent.is_dir():
            raise DclsConvertError(f"--track {options.track}: there is no folder for this file")
        if options.auto_resume:
            of_script = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            for name, default in (
                ("--output", "output/train"),
                ("--experiment", ""),
                ("--resume", ""),
            ):
                of_script.add_argument(name, default=default)
            run, _ = of_script.parse_known_args(options.arguments)
            if not run.experiment:
                raise DclsConvertError(
                    "--auto-resume needs the script's --experiment NAME, "
                    "so that runs share a folder"
                )
            last = Path(run.output, run.experiment, LAST)
            if last.is_file() and not run.resume:
                options.arguments += ["--resume", str(last)]
        sys.argv = [str(options.script), *options.arguments]
        sys.path[0] = str(
            options.script.resolve().parent
        )  # which Python searches first when it runs a script
        optim: Any = importlib.import_module("timm.optim")
        optim.create_optimizer_v2 = partial(create_optimizer, optim.create_optimizer_v2, options)
        runpy.run_path(str(options.script), run_name="__main__")
    except DclsConvertError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
