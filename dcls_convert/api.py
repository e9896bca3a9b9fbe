"""The library in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from .errors import PlanError
from .models import known_source
from .options import AUTO, DEFAULT_BUDGET, EXACT, INTERPOLATIONS, SCOPES, Init, Interpolation, Positions, Scope, Tie
from .plan import plan_conversion
from .report import ConversionReport, measure_report
from .rules import RuleSet
from .sites import find_convs
from .surgery import apply_plan_


def convert_(
    model: nn.Module,
    *,
    dilated_size: int | Sequence[int] | None = None,
    kernel_count: int | Literal["auto"] = "auto",
    rules: RuleSet | str | Path = AUTO,
    scope: Scope = "model",
    tie: Tie = "stage",
    budget: float = DEFAULT_BUDGET,
    interpolation: Interpolation = "bilinear",
    init: Init = "auto",
    positions: Positions = "normal",
    input_size: Sequence[int] | None = None,
    strict: bool = False,
    seed: int = 0,
) -> ConversionReport:
    """Replace the matching convolutions of `model` by DCLS layers, in place, and report what it costs.

    Args:
        model: Any module; its device, dtype, mode, hooks and frozen parameters stay as they are.
        dilated_size: Window of the elements, in cells; without it, the size that the rules state (17 for depthwise, 7
            for 3x3 convolutions).
        kernel_count, scope, tie, budget, interpolation, strict: As in `plan_conversion`.
        rules: A rule set, its name or its file.
        init: "largest" (also "auto") keeps the cells of every kernel with the most energy over its tie group; "random"
            starts from random positions, as the paper trains from scratch; "exact" gives every kernel as many elements
            as it had cells, at their places, so that the model's outputs stay as they are at more parameters.
        positions: For "random": "normal" is N(0, 0.5 cells), "uniform" is over the window.
        input_size: (channels, rows, columns) for MACs; without it, the size that a timm model states.
        seed: For random positions. The global generator is not touched.

    Returns:
        The report, measured on the converted model. `report.layers[0].kernel_count`, `report.params.after` and so on;
        `save_converted(model, report.plan, folder)` writes a checkpoint.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    if init == EXACT and (kernel_count != AUTO or scope != SCOPES[0] or budget != DEFAULT_BUDGET):
        raise PlanError(
            "init='exact' takes as many elements as the old kernels have cells: leave kernel_count, scope and budget"
        )
    source = known_source(model)
    convs = find_convs(model, input_size)
    plan = plan_conversion(
        convs,
        str(rules) if isinstance(rules, Path) else rules,
        dilated_size=dilated_size,
        kernel_count="exact" if init == EXACT else kernel_count,
        scope=scope,
        tie=tie,
        budget=budget,
        interpolation=None if interpolation == INTERPOLATIONS[0] else interpolation,  # the default, not a demand
        strict=strict,
        model=source.name if source else None,
        model_args=source.args if source else None,
    )
    apply_plan_(model, plan, init=init, positions=positions, generator=torch.Generator().manual_seed(seed))
    return measure_report(model, plan)
