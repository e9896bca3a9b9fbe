"""Run timm's own train.py, unchanged, on converted models:

    python timm_train.py [OPTIONS] path/to/train.py ARGUMENTS...

timm can then load converted folders. For a model with DCLS layers, positions are trained as in the
paper: they learn faster than the weights, do not decay, and are clamped after every step. Options
add the repulsive loss and a record of positions. See docs/timm.md.
"""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import timm.optim
import torch
from torch import nn

from dcls_convert import DclsConvertError, tuning

# Arguments of timm's create_optimizer_v2 that make its parameter groups -> their names in timm's
# functions for groups, to which `param_groups` passes them.
GROUP_ARGUMENTS = {
    "weight_decay": "weight_decay",
    "filter_bias_and_bn": "weight_decay_exclude_1d",
    "fallback_list": "fallback_list",
    "fallback_no_weight_decay": "fallback_no_weight_decay",
    "layer_decay": "layer_decay",
}
# The same for arguments that have an effect with `layer_decay` alone.
LAYER_DECAY_ARGUMENTS = {
    "layer_decay_min_scale": "min_scale",
    "layer_decay_no_opt_scale": "no_opt_scale",
}


def main() -> None:
    options = parse_arguments()
    check_model(options.arguments)
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)  # where Python looks for its imports
    timm_create = timm.optim.create_optimizer_v2
    timm.optim.create_optimizer_v2 = partial(create_optimizer, timm_create, options)
    runpy.run_path(str(options.script), run_name="__main__")


def check_model(arguments: list[str]) -> None:
    """Refuse a --model that lacks timm's prefix for folders, or that is not there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    name = parser.parse_known_args(arguments)[0].model
    folder = name.removeprefix("local-dir:")
    if folder != name and not Path(folder).is_dir():
        raise DclsConvertError(f"--model {name}: there is no such folder")
    if folder == name and name and Path(name).is_dir() and not timm.is_model(name):
        raise DclsConvertError(f"--model {name}: is a folder; write --model local-dir:{name}")


def create_optimizer(
    timm_create: Callable[..., Any], options: argparse.Namespace, model: Any, **kwargs: Any
) -> torch.optim.Optimizer:
    """Make timm's optimizer, with groups of their own for positions, which it clamps."""
    positions = positions_of(model)
    if not positions:
        return timm_create(model, **kwargs)
    group_arguments = dict(GROUP_ARGUMENTS)
    if kwargs.get("layer_decay") is not None:
        group_arguments |= LAYER_DECAY_ARGUMENTS
    group_options = {"weight_decay": 0.0}  # timm's default
    for name, group_name in group_arguments.items():
        if name in kwargs:
            group_options[group_name] = kwargs[name]
    groups = partial(
        tuning.param_groups, position_lr_scale=options.position_lr_scale, **group_options
    )
    optimizer = timm_create(model, **{"param_group_fn": groups, **kwargs})
    stepping = getattr(optimizer, "_base_optimizer", optimizer)  # inside timm's Lookahead
    if options.repulsive_loss_from is not None or options.track is not None:
        script = vars(sys.modules["__main__"])
        epochs = Epochs(script["train_one_epoch"], model, positions, options)
        script["train_one_epoch"] = epochs.train_one_epoch
        stepping.register_step_pre_hook(epochs.repel)
    stepping.register_step_post_hook(lambda *_: tuning.clamp_positions_(model))
    return optimizer


def positions_of(model: Any) -> list[nn.Parameter]:
    """Return the trainable positions of DCLS layers; none if timm is given parameters alone."""
    if not isinstance(model, nn.Module):
        return []
    positions = []
    for name, parameter in model.named_parameters():
        if name.endswith("positions") and parameter.requires_grad:
            positions.append(parameter)
    return positions


class Epochs:
    """train.py's `train_one_epoch(epoch, ...)`, with the repulsive loss and a record."""

    def __init__(
        self,
        train: Callable[..., Any],
        model: nn.Module,
        positions: list[nn.Parameter],
        options: argparse.Namespace,
    ) -> None:
        self.train = train
        self.model = model
        self.positions = positions
        self.repulsive_loss_from = options.repulsive_loss_from
        self.repels = False
        self.track = options.track
        self.tracker: tuning.PositionTracker | None = None

    def train_one_epoch(self, epoch: int, *args: Any, **kwargs: Any) -> Any:
        if self.repulsive_loss_from is not None:
            self.repels = epoch >= self.repulsive_loss_from
            loss = tuning.repulsive_loss(self.model).item()
            if os.environ.get("RANK", "0") == "0":
                state = "on" if self.repels else "off"
                logging.info(f"epoch {epoch}: repulsive loss {loss:.3g}, {state}")
        if self.track is not None and self.tracker is None:
            self.tracker = tuning.PositionTracker(self.model, self.track, unit="epoch")
            self.tracker.update(epoch)  # number of epochs so far; the next speed is from here
        result = self.train(epoch, *args, **kwargs)
        if self.tracker is not None:
            self.tracker.update(epoch + 1)
        return result

    def repel(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add the gradient of the squared repulsive loss to those of the positions.

        It depends on the positions alone, so it is added once a step, after gradients were
        accumulated, averaged over processes and clipped.
        """
        if not self.repels:
            return
        with torch.enable_grad():  # Lookahead steps without gradients
            loss = tuning.repulsive_loss(self.model) ** 2
            gradients = torch.autograd.grad(loss, self.positions)
        # A fused optimizer unscales AMP's gradients in its step: here they are still scaled.
        scale = getattr(optimizer, "grad_scale", None)
        for parameter, gradient in zip(self.positions, gradients, strict=True):
            if scale is not None:
                gradient = gradient * scale
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("timm_train.py", allow_abbrev=False)
    parser.add_argument(
        "--position-lr-scale",
        type=float,
        default=5.0,
        metavar="X",
        help="factor of the learning rate for positions",
    )
    parser.add_argument(
        "--repulsive-loss-from",
        type=int,
        metavar="EPOCH",
        help="epoch from which the square of the repulsive loss is added",
    )
    parser.add_argument(
        "--track",
        type=os.path.expanduser,  # the shell leaves a "~" in quotes
        metavar="FILE",
        help="record the positions at the start and after every epoch",
    )
    parser.add_argument("script", type=Path, help="timm's train.py, from its repository")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()
    if not options.script.is_file():
        parser.error(f"{options.script}: is not a file; train.py is in timm's repository")
    return options


if __name__ == "__main__":
    try:
        main()
    except DclsConvertError as error:
        raise SystemExit(f"error: {error}") from None
