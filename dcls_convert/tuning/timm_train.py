"""Run timm's own train.py on converted models: python -m dcls_convert.tuning.timm_train train.py ARGUMENTS...

Two things happen before the script runs. First, this package is imported, so that timm can load its folders
(`--model local-dir:FOLDER --pretrained`). Second, timm's `create_optimizer_v2` is made to group parameters by
`tuning.param_groups`, unless the script names another function: positions get five times the learning rate and no
weight decay.
"""

import contextlib
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import DclsConvertError
from ..layers.positions import position_parameters
from .param_groups import POSITION_LR_SCALE, param_groups

USAGE = "python -m dcls_convert.tuning.timm_train [--position-lr-scale X] SCRIPT.py [ARGUMENTS...]"
SCALE_OPTION = "--position-lr-scale"
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


def with_position_groups(
    create_optimizer: Callable[..., Any], position_lr_scale: float = POSITION_LR_SCALE
) -> Callable[..., Any]:
    """Wrap timm's `create_optimizer_v2` to use `tuning.param_groups` if the caller gives no `param_group_fn`.

    Nothing changes for models without DCLS layers, and for parameters that the caller has grouped already. The groups
    have an `lr_scale`, which timm's schedulers apply.
    """
    signature = inspect.signature(create_optimizer)

    @wraps(create_optimizer)
    def create(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, model = bound.arguments, args[0] if args else kwargs.get("model_or_params")
        if given.get("param_group_fn") is None and isinstance(model, nn.Module) and position_parameters(model):
            wanted = GROUPING if given.get("layer_decay") is None else GROUPING | LAYER_GROUPING
            options = {ours: given[timms] for timms, ours in wanted.items() if timms in given}
            kwargs["param_group_fn"] = partial(param_groups, position_lr_scale=position_lr_scale, **options)
        return create_optimizer(*args, **kwargs)

    return create


@contextlib.contextmanager
def position_groups_in_timm(position_lr_scale: float = POSITION_LR_SCALE) -> Iterator[None]:
    """Replace `timm.optim.create_optimizer_v2` by `with_position_groups` of it, until the block ends."""
    optim: Any = importlib.import_module("timm.optim")
    before = optim.create_optimizer_v2
    optim.create_optimizer_v2 = with_position_groups(before, position_lr_scale)
    try:
        yield
    finally:
        optim.create_optimizer_v2 = before


def run_script(arguments: list[str]) -> None:
    """Run `[--position-lr-scale X] SCRIPT ARGUMENTS...` as `python SCRIPT ARGUMENTS...` would.

    Raises:
        DclsConvertError: There is no script, or the scale is not a number.
    """
    scale = POSITION_LR_SCALE
    if arguments and arguments[0].partition("=")[0] == SCALE_OPTION:
        option, equals, value = arguments[0].partition("=")
        value, arguments = (value, arguments[1:]) if equals else ("".join(arguments[1:2]), arguments[2:])
        try:
            scale = float(value)
        except ValueError as error:
            raise DclsConvertError(f"{option} {value!r} must be a number") from error
    if not arguments or arguments[0].startswith("-"):
        raise DclsConvertError(f"name the script to run: {USAGE}")
    script = Path(arguments[0])
    if not script.is_file():
        raise DclsConvertError(f"{script}: no such script; timm's train.py is in its repository, not in its wheel")
    sys.argv = [str(script), *arguments[1:]]
    sys.path[0] = os.fspath(script.resolve().parent)  # the folder that Python searches first when it runs a script
    with position_groups_in_timm(scale):
        runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    try:
        run_script(sys.argv[1:])
    except DclsConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
