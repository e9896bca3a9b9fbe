"""Run timm's own train.py on converted models: python -m dcls_convert.tuning.timm_train [OPTIONS] train.py ARGUMENTS...

This package is imported before the script runs, so that timm can load its folders
(`--model local-dir:FOLDER --pretrained`). Then timm's `create_optimizer_v2` is made to do three things more for models
with DCLS layers. It groups parameters by `tuning.param_groups`, unless the script names another function: positions get
five times the learning rate and no weight decay. It clamps positions after every step. And with
`--repulsive-loss-from EPOCH`, the repulsive loss pushes elements apart from that epoch on.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import DclsConvertError
from ..networks.positions import clamp_positions_, position_parameters
from .param_groups import POSITION_LR_SCALE, param_groups
from .repulsion import repulsive_loss
from .tracker import PositionTracker, is_first_rank

USAGE = "python -m dcls_convert.tuning.timm_train [OPTIONS] SCRIPT.py [ARGUMENTS...]"
OUTPUT = "output/train"  # of train.py without --output
LAST = "last.pth.tar"  # train.py writes it after every epoch
log = logging.getLogger(__name__)
# Arguments of timm's create_optimizer_v2 -> their names in timm's functions for parameter groups.
GROUPING = {
    "weight_decay": "weight_decay",
    "filter_bias_and_bn": "weight_decay_exclude_1d",
    "fallback_list": "fallback_list",
    "fallback_no_weight_decay": "fallback_no_weight_decay",
}
LAYER_GROUPING = {
    "layer_decay": "layer_decay",
    "layer_decay_min_scale": "min_scale",
    "layer_decay_no_opt_scale": "no_opt_scale",
}


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """What a run has of the paper's techniques (section 3) beside clamping, and what it records."""

    position_lr_scale: float = POSITION_LR_SCALE
    repulsive_loss_from: int | None = None  # epoch, the first is 0; None: never
    track: str | None = None  # file of a `PositionTracker`, which takes a record after every epoch


def with_position_groups(
    create_optimizer: Callable[..., Any], techniques: Techniques | None = None
) -> Callable[..., Any]:
    """Wrap timm's `create_optimizer_v2` to use `tuning.param_groups` if the caller gives no `param_group_fn`.

    The groups have an `lr_scale`, which timm's schedulers apply. Every step of the optimizer ends with positions inside
    their windows. Nothing changes for models without DCLS layers, and the groups stay where the caller made them.

    Raises:
        DclsConvertError: The repulsive loss or a record is wanted, and the optimizer is for no model with DCLS layers,
            or the script has no function `train_one_epoch(epoch, ...)`.
    """
    techniques = techniques or Techniques()
    signature = inspect.signature(create_optimizer)

    @wraps(create_optimizer)
    def create(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, model = bound.arguments, args[0] if args else kwargs.get("model_or_params")
        if not (isinstance(model, nn.Module) and position_parameters(model)):
            if techniques.repulsive_loss_from is not None or techniques.track is not None:
                raise DclsConvertError(
                    "--repulsive-loss-from and --track: the script makes its optimizer for no model with DCLS layers"
                )
            return create_optimizer(*args, **kwargs)
        if given.get("param_group_fn") is None:
            wanted = GROUPING if given.get("layer_decay") is None else GROUPING | LAYER_GROUPING
            options = {ours: given[timms] for timms, ours in wanted.items() if timms in given}
            scale = techniques.position_lr_scale
            kwargs["param_group_fn"] = partial(param_groups, position_lr_scale=scale, **options)
        optimizer = create_optimizer(*args, **kwargs)
        _Run(model, techniques).attach_(optimizer)
        return optimizer

    return create


class _Run:
    """What happens to the positions of one model at every step and after every epoch."""

    def __init__(self, model: nn.Module, techniques: Techniques) -> None:
        self.model, self.repulsive_from, self.repulsive = model, techniques.repulsive_loss_from, False
        self.tracker = None if techniques.track is None else PositionTracker(model, techniques.track)

    def attach_(self, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(lambda stepping, *_: self._repel(stepping))
        optimizer.register_step_post_hook(lambda *_: clamp_positions_(self.model))
        if self.repulsive_from is not None or self.tracker is not None:
            script = sys.modules["__main__"]
            train = getattr(script, "train_one_epoch", None)
            if train is None or "epoch" not in inspect.signature(train).parameters:
                raise DclsConvertError(
                    "--repulsive-loss-from and --track need a script that trains by a function "
                    "train_one_epoch(epoch, ...), as timm's train.py does"
                )
            vars(script)["train_one_epoch"] = self._with_epochs(train)

    def _with_epochs(self, train: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(train)

        @wraps(train)
        def train_one_epoch(*args: Any, **kwargs: Any) -> Any:
            epoch = signature.bind(*args, **kwargs).arguments["epoch"]
            if self.repulsive_from is not None:
                self.repulsive = epoch >= self.repulsive_from
                with torch.no_grad():
                    value = float(repulsive_loss(self.model))
                if is_first_rank():
                    log.info(f"epoch {epoch}: repulsive loss {value:.3g}, {'on' if self.repulsive else 'off'}")
            result = train(*args, **kwargs)
            if self.tracker is not None:
                self.tracker.update(epoch)
            return result

        return train_one_epoch

    def _repel(self, optimizer: Any) -> None:
        if self.repulsive:
            # Fused optimizers divide gradients by the scale of AMP themselves.
            scaler = getattr(optimizer, "grad_scale", None)
            add_repulsion_(self.model, 1.0 if scaler is None else scaler)


def add_repulsion_(model: nn.Module, scale: float | torch.Tensor = 1.0) -> None:
    """Add to the positions' gradients `scale` times that of `repulsive_loss(model) ** 2`.

    Before a step, this is the same as adding the square to the loss: it depends on positions alone, so all processes
    add the same, and once where gradients are accumulated over batches. Clipping of gradients has come before.
    """
    found = [one.tensor for one in position_parameters(model) if one.kind == "positions" and one.tensor.requires_grad]
    if not found:
        return
    gradients = torch.autograd.grad(repulsive_loss(model) ** 2, found)
    for tensor, gradient in zip(found, gradients, strict=True):
        gradient = gradient * scale
        tensor.grad = gradient if tensor.grad is None else tensor.grad.add_(gradient)


@contextlib.contextmanager
def position_groups_in_timm(techniques: Techniques | None = None) -> Iterator[None]:
    """Replace `timm.optim.create_optimizer_v2` by `with_position_groups` of it, until the block ends."""
    optim: Any = importlib.import_module("timm.optim")
    before = optim.create_optimizer_v2
    optim.create_optimizer_v2 = with_position_groups(before, techniques)
    try:
        yield
    finally:
        optim.create_optimizer_v2 = before


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DclsConvertError(f"{message}; usage: {USAGE}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from error


def _epoch(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be the number of an epoch; the first is 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(usage=USAGE, description="Run timm's train.py on converted models.", allow_abbrev=False)
    add = parser.add_argument
    text = "times the learning rate for positions (default: %(default)g)"
    add("--position-lr-scale", type=_number, metavar="X", default=POSITION_LR_SCALE, help=text)
    text = "add the square of the repulsive loss from this epoch on; the first is 0, the paper's authors took 21"
    add("--repulsive-loss-from", type=_epoch, metavar="EPOCH", help=text)
    add("--track", metavar="FILE", help="append a record of all positions after every epoch, as PositionTracker does")
    text = f"resume from {LAST} in the script's --output/--experiment, where an earlier run has left one"
    add("--auto-resume", action="store_true", help=text)
    add("script", nargs="?", metavar="SCRIPT.py", help="timm's train.py, from its repository")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="for the script")
    return parser


def resumed(arguments: list[str]) -> list[str]:
    """Arguments of train.py, with `--resume` of the last checkpoint if its folder has one and `--resume` is not given.

    Raises:
        DclsConvertError: No `--experiment`: train.py would then name the folder by the time of its start.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--output", "--experiment", "--resume"):
        parser.add_argument(name, default="")
    given, _ = parser.parse_known_args(arguments)
    if not given.experiment:
        raise DclsConvertError("--auto-resume needs the script's --experiment NAME, so that runs share a folder")
    last = Path(given.output or OUTPUT, given.experiment, LAST)
    return [*arguments, "--resume", str(last)] if last.is_file() and not given.resume else arguments


def run_script(arguments: list[str]) -> None:
    """Run `[OPTIONS] SCRIPT ARGUMENTS...` as `python SCRIPT ARGUMENTS...` would.

    Raises:
        DclsConvertError: There is no script, or an option is wrong.
    """
    given = _parser().parse_args(arguments)
    if given.script is None:
        raise DclsConvertError(f"name the script to run: {USAGE}")
    script = Path(given.script)
    if not script.is_file():
        raise DclsConvertError(f"{script}: no such script; timm's train.py is in its repository, not in its wheel")
    if given.track is not None and not Path(given.track).absolute().parent.is_dir():
        raise DclsConvertError(f"--track {given.track}: there is no folder for this file")
    sys.argv = [str(script), *(resumed(given.arguments) if given.auto_resume else given.arguments)]
    sys.path[0] = os.fspath(script.resolve().parent)  # the folder that Python searches first when it runs a script
    techniques = Techniques(
        position_lr_scale=given.position_lr_scale, repulsive_loss_from=given.repulsive_loss_from, track=given.track
    )
    with position_groups_in_timm(techniques):
        runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    try:
        run_script(sys.argv[1:])
    except DclsConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
