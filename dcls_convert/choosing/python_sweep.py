"""Sweep a model in memory: the Python counterpart of `dcls-convert sweep`."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from ..conversion.request import ConversionRequest
from ..errors import PlanError, check_argument
from ..networks.inputs import ExampleInputs
from ..options import (
    AUTO,
    MAX_ADDED_COST_PERCENT,
    InterpolationName,
    Tie,
    suggests_arguments,
)
from ..planning.plan_options import PlanOptions
from ..planning.rules import RuleSet
from ..progress import show_progress_in_python
from .make_sweep import make_sweep
from .rows import Combination, RequestedSize
from .sweep import Sweep

ROW_OPTIONS = ("dilated_size", "kernel_count", "budget")  # options that differ from row to row


@suggests_arguments
def sweep(
    model: nn.Module,
    sizes: Sequence[int | Sequence[int] | str] | None = None,
    *,
    counts: Sequence[int] | None = None,
    budgets: Sequence[float] | None = None,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    tie: Tie = "stage",
    interpolation: InterpolationName | None = None,
    strict: bool = False,
    input_size: Sequence[int] | None = None,
    example_inputs: ExampleInputs | None = None,
    trained: bool = True,
    added_macs: float = MAX_ADDED_COST_PERCENT,
    progress: bool | None = None,
) -> Sweep:
    """Compare windows, and counts or budgets, by parameters and MACs. The model is not changed.

    Args:
        model: An unconverted network.
        sizes: Windows in cells, as one integer or one per side, or growths such as "+4". None tries
            windows from the kernels' own extent on, or growths if kernels differ in extent.
        counts: Elements per kernel. None: as many as the budget allows.
        budgets: Percent of the replaced weights, such as (60, 80, 100), instead of counts.
        rules, tie, interpolation, strict: See `convert_`.
        input_size, example_inputs: See `convert_`. If they are unknown, so are the MACs, and no
            size is recommended.
        trained: False if the network will be trained from random weights. For a trained network,
            no size is recommended: without further training, a larger window gains nothing.
        added_macs: Percent that the recommended size may add to the MACs.
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
    check_argument("model", model, nn.Module)
    request = ConversionRequest(
        model=model,
        options=PlanOptions(rules=rules, tie=tie, interpolation=interpolation, strict=strict),
        init="auto" if trained else "random",
        input_size=input_size,
        example_inputs=example_inputs,
    )
    windows: list[RequestedSize] = []
    for size in sizes or ():
        if isinstance(size, int | str):
            windows.append(size)
        else:
            windows.append(tuple(size))
    with show_progress_in_python(type(model).__name__, progress) as notify:
        return make_sweep(
            request,
            windows,
            counts,
            budgets,
            functools.partial(_call_text, request),
            max_added_percent=added_macs,
            notify=notify,
        )


def _call_text(request: ConversionRequest, combination: Combination) -> str:
    """Return the text of the call of `convert_` that does the conversion of a row.

    A value that is neither a string nor an integer is written as a variable: `rules=rules`.
    """
    arguments: dict[str, Any] = {"dilated_size": combination.size}
    if combination.kernel_count is not None:
        arguments["kernel_count"] = combination.kernel_count
    if combination.budget is not None:
        arguments["budget"] = combination.budget
    texts = [f"{name}={value!r}" for name, value in arguments.items()]
    others: dict[str, Any] = {}
    for option in fields(request.options):
        value = getattr(request.options, option.name)
        if option.name not in ROW_OPTIONS and value != option.default:
            others[option.name] = value
    if request.init != AUTO:
        others["init"] = request.init
    if request.input_size is not None:
        others["input_size"] = request.input_size
    if request.example_inputs is not None:
        others["example_inputs"] = request.example_inputs
    for name, value in others.items():
        text = name
        if isinstance(value, str | int):
            text = repr(value)
        texts.append(f"{name}={text}")
    return f"dcls_convert.convert_(model, {', '.join(texts)})"
