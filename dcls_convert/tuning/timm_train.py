"""Run timm's own train.py on converted models:

    python -m dcls_convert.tuning.timm_train [OPTIONS] train.py ARGUMENTS...

This lets train.py load converted folders. Positions get separate parameter groups
(`tuning.param_groups`) and are clamped after every step. Options add the repulsive loss and records
of positions.
"""

import argparse
import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..networks.position_parameters import position_parameters
from ..options import POSITION_LR_SCALE
from .clamp_positions import clamp_positions_
from .param_groups import param_groups
from .repulsion import repulsive_loss
from .tracker import PositionTracker, is_first_rank

# Argument of timm's create_optimizer_v2 -> its name in timm's functions for parameter groups.
GROUP_ARGUMENTS = {
    "weight_decay": "weight_decay",
    "layer_decay": "layer_decay",
    "fallback_list": "fallback_list",
    "fallback_no_weight_decay": "fallback_no_weight_decay",
    "filter_bias_and_bn": "weight_decay_exclude_1d",
}
# The same for arguments that only timm's function for layer decay has.
LAYER_DECAY_ARGUMENTS = {
    "layer_decay_min_scale": "min_scale",
    "layer_decay_no_opt_scale": "no_opt_scale",
}


def create_optimizer(
    timm_create: Callable[..., Any],
    options: argparse.Namespace,
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make timm's optimizer, with separate groups for positions, which it clamps after every step.

    The options may also add the repulsive loss and records of positions.

    Args:
        timm_create: timm's `create_optimizer_v2`.
        options: Options of this program.
        model: The model or its parameters; timm's function accepts both.
        args: Other positional arguments of timm's function.
        kwargs: Keyword arguments of timm's function.

    Raises:
        DclsConvertError: The options need something that the model or the script does not have.
    """
    needs_epochs = options.repulsive_loss_from is not None or options.track is not None
    is_converted = isinstance(model, nn.Module) and len(position_parameters(model)) > 0
    has_train_one_epoch = hasattr(sys.modules["__main__"], "train_one_epoch")
    if needs_epochs and not (is_converted and has_train_one_epoch):
        raise DclsConvertError(
            "--repulsive-loss-from and --track need a model with DCLS layers, "
            "and a train_one_epoch(epoch, ...) in the script"
        )
    if is_converted and kwargs.get("param_group_fn") is None:
        kwargs["param_group_fn"] = _param_group_function(options, kwargs)
    optimizer = timm_create(model, *args, **kwargs)
    if is_converted:
        _hooked(optimizer).register_step_post_hook(lambda *_: clamp_positions_(model))
    if needs_epochs:
        follow_epochs_(model, optimizer, options)
    return optimizer


def _hooked(optimizer: Any) -> Any:
    """Return the optimizer whose step calls hooks: for timm's Lookahead, the one that it wraps."""
    return getattr(optimizer, "_base_optimizer", optimizer)


def _param_group_function(
    options: argparse.Namespace, arguments: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return `param_groups`, bound to the arguments with which timm would make its own groups."""
    names = dict(GROUP_ARGUMENTS)
    if arguments.get("layer_decay") is not None:
        names |= LAYER_DECAY_ARGUMENTS
    group_arguments: dict[str, Any] = {"weight_decay": 0.0}
    for name, group_name in names.items():
        if name in arguments:
            group_arguments[group_name] = arguments[name]
    return partial(param_groups, position_lr_scale=options.position_lr_scale, **group_arguments)


def follow_epochs_(model: nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
    """Replace the script's `train_one_epoch(epoch, ...)` by one that also repels and records.

    Positions are repelled from the epoch of `--repulsive-loss-from` on, and recorded after every
    epoch if there is `--track`.
    """
    script = vars(sys.modules["__main__"])
    train = script["train_one_epoch"]
    tracker = None if options.track is None else PositionTracker(model, options.track)
    positions = []
    for parameter in position_parameters(model, "positions"):
        if parameter.tensor.requires_grad:
            positions.append(parameter.tensor)
    is_repelling = False
    is_first = True

    def train_one_epoch(epoch: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_repelling, is_first
        if tracker is not None and is_first:
            _begin_record(tracker, epoch)
        is_first = False
        if options.repulsive_loss_from is not None:
            is_repelling = epoch >= options.repulsive_loss_from
            _log_repulsive_loss(model, epoch, is_repelling)
        result = train(epoch, *args, **kwargs)
        if tracker is not None:
            tracker.update(epoch)
        return result

    def repel(stepping_optimizer: Any, *_: Any) -> None:
        if is_repelling and positions:
            # A fused optimizer unscales AMP's gradients in its step; here they are still scaled.
            scale = getattr(stepping_optimizer, "grad_scale", None)
            with torch.enable_grad():  # Lookahead steps without gradients
                add_repulsive_gradients_(model, positions, scale)

    _hooked(optimizer).register_step_pre_hook(repel)
    script["train_one_epoch"] = train_one_epoch


def _begin_record(tracker: PositionTracker, epoch: int) -> None:
    """Continue the record of a run that was resumed; refuse a file of another run."""
    if epoch > 0:
        tracker.continue_from(epoch - 1)
    elif tracker.path is not None and tracker.path.exists():
        raise DclsConvertError(f"--track {tracker.path}: exists; name a new file for a new run")


def _log_repulsive_loss(model: nn.Module, epoch: int, is_repelling: bool) -> None:
    loss = repulsive_loss(model).item()  # under FSDP2, all ranks must call it
    if is_first_rank():
        state = "on" if is_repelling else "off"
        logging.getLogger(__name__).info(f"epoch {epoch}: repulsive loss {loss:.3g}, {state}")


def add_repulsive_gradients_(model: nn.Module, positions: Sequence[Tensor], scale: Any) -> None:
    """Add the gradient of the squared repulsive loss to the gradients of the positions.

    This has the effect of adding the squared loss to the training loss. It is done once per step,
    after gradients were accumulated, averaged over processes and clipped. The loss depends only on
    the positions, so all processes add the same gradient.

    Args:
        model: The model whose repulsive loss is computed.
        positions: The trainable positions of the model.
        scale: Factor for the gradients that are added; None means 1.
    """
    gradients = torch.autograd.grad(repulsive_loss(model) ** 2, positions)
    for tensor, gradient in zip(positions, gradients, strict=True):
        if scale is not None:
            gradient = gradient * scale
        if tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad.add_(gradient)


def main() -> None:
    """Run `[OPTIONS] SCRIPT ARGUMENTS...` as `python SCRIPT ARGUMENTS...` would."""
    parser = _parser()
    options = parser.parse_args()
    try:
        if not options.script.is_file():
            raise DclsConvertError(
                f"{options.script}: no such script; timm's train.py is in its repository"
            )
        if options.track is not None and not options.track.parent.is_dir():
            raise DclsConvertError(f"--track {options.track}: there is no folder for this file")
        sys.argv = [str(options.script), *options.arguments]
        # Python searches the script's folder first for imports when it runs the script itself.
        sys.path[0] = str(options.script.resolve().parent)
        optim: Any = importlib.import_module("timm.optim")
        optim.create_optimizer_v2 = partial(create_optimizer, optim.create_optimizer_v2, options)
        runpy.run_path(str(options.script), run_name="__main__")
    except DclsConvertError as error:
        parser.exit(2, f"error: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dcls_convert.tuning.timm_train", allow_abbrev=False)
    parser.add_argument(
        "--position-lr-scale",
        type=float,
        default=POSITION_LR_SCALE,
        metavar="X",
        help="factor of the learning rate for positions",
    )
    parser.add_argument(
        "--repulsive-loss-from",
        type=int,
        metavar="X",
        help="epoch from which the square of the repulsive loss is added",
    )
    parser.add_argument(
        "--track",
        type=Path,
        metavar="FILE",
        help="append a record of all positions after every epoch",
    )
    parser.add_argument(
        "script",
        type=Path,
        metavar="SCRIPT.py",
        help="timm's train.py, from its repository",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="for the script"
    )
    return parser


if __name__ == "__main__":
    main()
