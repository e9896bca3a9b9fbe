"""Sweep a model in memory: the Python counterpart of `dcls-convert sweep`."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from ..conversion.in_memory import warn_if_untrained
from ..conversion.loaded import LoadedNetwork
from ..conversion.request import ConversionRequest
from ..errors import PlanError
from ..fitting.calibration_images import Calibration, Images
from ..networks.copying import copy_network
from ..networks.find_convs import check_module
from ..options import (
    AUTO,
    MAX_ADDED_COST_PERCENT,
    Init,
    InterpolationName,
    PlanOptions,
    Positions,
    Scope,
    Tie,
    suggests_arguments,
)
from ..planning.claims import assign_rules, load_or_choose_rules
from ..planning.rules import RuleSet
from ..progress import show_progress_in_python
from .make_sweep import combinations, default_sizes, make_sweep
from .results import Combination, RequestedSize, Sweep
from .timing import timing_settings

ROW_OPTIONS = ("dilated_size", "kernel_count", "budget")  # options that differ from row to row
# Arguments that `sweep` and `convert_` share, besides the planning options.
CONVERT_ARGUMENTS = (
    "init",
    "positions",
    "calibration",
    "held_out",
    "mean",
    "std",
    "input_size",
    "seed",
)


@suggests_arguments
def sweep(
    model: nn.Module,
    sizes: Sequence[int | Sequence[int] | str] | None = None,
    *,
    counts: Sequence[int] | None = None,
    budgets: Sequence[float] | None = None,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    scope: Scope = AUTO,
    tie: Tie = "stage",
    interpolation: InterpolationName | None = None,
    strict: bool = False,
    init: Init = "auto",
    positions: Positions = "normal",
    calibration: Images | Calibration | None = None,
    held_out: Images | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_size: Sequence[int] | None = None,
    seed: int = 0,
    slower: float = MAX_ADDED_COST_PERCENT,
    time: bool = False,
    device: str | None = None,
    batch_size: int | None = None,
    seconds: int | None = None,
    amp: bool = False,
    progress: bool | None = None,
) -> Sweep:
    """Compare windows, and counts or budgets, by parameters, MACs, and errors of the conversion.

    The model is not changed; copies of it are converted.

    Args:
        model: An unconverted network.
        sizes: Windows in cells, as one integer or one per side, or growths such as "+4". None tries
            windows from the kernels' own extent on, or growths if kernels differ in extent.
        counts: Elements per kernel. None: as many as the budget allows.
        budgets: Percent of the replaced weights, such as (60, 80, 100), instead of counts.
        rules, scope, tie, interpolation, strict: See `convert_`.
        init, positions, calibration, held_out, mean, std, seed: See `convert_`.
        input_size: See `convert_`. If it is unknown, so are the MACs, and no size is recommended.
        slower: Percent that the recommended size may add: to the training step with `time`, else to
            the MACs.
        time: Measure a forward pass and a training step of every row and of the original, in turn.
        device: Device to time on, named as in torch; None for the CPU.
        batch_size: Images per batch when timing; by default 1 on the CPU, else 32.
        seconds: Time limit for all measurements, 60 by default; three rounds are always made.
        amp: Measure in bfloat16 autocast.
        progress: See `convert_`.

    Returns:
        A row for each combination, the original first, and the recommended row. It is shown as a
        table in notebooks and by `print`. `rows[index].command` is the call that converts in the
        same way.

    Raises:
        DclsConvertError: An argument does not fit; one line says which. A size that does not fit
            does not raise, but is a row with the reason.
    """
    if counts is not None and budgets is not None:
        raise PlanError("counts and budgets exclude each other")
    if isinstance(sizes, str | int):
        raise PlanError(f"sizes={sizes!r} must be a list, such as [5, 7, 9]")
    check_module(model)
    timing = None
    if time:
        timing = timing_settings(device, batch_size, seconds, amp=amp)
        # Timing moves the model to the device, and changes statistics such as BatchNorm's.
        model = copy_network(model)
    request = ConversionRequest(
        model=model,
        options=PlanOptions(
            rules=rules, scope=scope, tie=tie, interpolation=interpolation, strict=strict
        ),
        init=init,
        positions=positions,
        calibration=calibration,
        held_out=held_out,
        mean=mean,
        std=std,
        input_size=input_size,
        seed=seed,
    )
    with show_progress_in_python(type(model).__name__, progress) as notify:
        loaded = LoadedNetwork(request, notify=notify)
        windows: list[RequestedSize] = []
        for size in sizes or default_sizes(loaded):
            windows.append(size if isinstance(size, int | str) else tuple(size))
        if request.start == "fit" and init == AUTO:
            rule_of, _ = assign_rules(load_or_choose_rules(rules, loaded.convs), loaded.convs)
            warn_if_untrained(model, rule_of)
        requested = combinations(windows, counts, budgets)
        command = functools.partial(_call_text, request)
        return make_sweep(loaded, requested, command, timing=timing, max_added_percent=slower)


def _call_text(request: ConversionRequest, combination: Combination) -> str:
    """Return the text of the call of `convert_` that does the conversion of a row.

    A value that is neither a string nor an integer is written as a variable: `mean=mean`.
    """
    arguments: dict[str, Any] = {"dilated_size": combination.size}
    if combination.kernel_count is not None:
        arguments["kernel_count"] = combination.kernel_count
    if combination.budget is not None:
        arguments["budget"] = combination.budget
    texts = [f"{name}={value!r}" for name, value in arguments.items()]
    others: list[tuple[str, Any, Any]] = []  # name, value, default
    for option in fields(request.options):
        if option.name not in ROW_OPTIONS:
            others.append((option.name, getattr(request.options, option.name), option.default))
    for argument in fields(request):
        if argument.name in CONVERT_ARGUMENTS:
            others.append((argument.name, getattr(request, argument.name), argument.default))
    for name, value, default in others:
        if isinstance(value, str | int):
            if value != default:
                texts.append(f"{name}={value!r}")
        elif value is not None:
            texts.append(f"{name}={name}")
    return f"dcls_convert.convert_(model, {', '.join(texts)})"
