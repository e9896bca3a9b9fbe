"""The library in one call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, PlanError
from ..networks.sites import find_convs
from ..networks.source import known_source, with_names_of
from ..networks.weights import read_weights
from ..options import (
    AUTO,
    DEFAULT_BUDGET,
    EXACT,
    INTERPOLATIONS,
    SCOPES,
    AuthorsVersion,
    Init,
    Interpolation,
    Positions,
    Scope,
    Tie,
)
from ..planning.planner import plan_conversion
from ..planning.rules import RuleSet
from ..reports.report import ConversionReport, measure_report
from .authors import sort_weights, start_from_authors_
from .place import apply_plan_


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
    calibration: Mapping[str, Tensor] | None = None,
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
        init: "fit" (also "auto") starts from the elements whose kernels are closest to the model's own; "largest" from
            the cells of every kernel with the most energy over its tie group; "random" from random positions, as the
            paper trains from scratch; "exact" gives every kernel as many elements as it had cells, at their places, so
            that the outputs stay as they are at more parameters.
        calibration: For "fit": from `calibrate`; the outputs then count instead of the kernels.
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
    generator = torch.Generator().manual_seed(seed)
    errors = apply_plan_(model, plan, init=init, positions=positions, generator=generator, calibration=calibration)
    return measure_report(model, plan).with_fit_errors(errors)


def convert_from_authors_(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    dilated_size: int | Sequence[int] | None = None,
    rules: RuleSet | str | Path = AUTO,
    tie: Tie = "stage",
    interpolation: Interpolation = "bilinear",
    version: AuthorsVersion | None = None,
    input_size: Sequence[int] | None = None,
    strict: bool = False,
) -> ConversionReport:
    """Convert `model` in place to what was trained with the authors' package, with the same outputs.

    Args:
        model: The unconverted network, such as `timm.create_model("convnext_tiny")`.
        weights: A state dict whose layers have `weight` (O, I, E) and `P` (axes, O, I, E), or the file that holds it.
            Names may be those of the original ConvNeXt. Elements and their count come from here.
        dilated_size: The window of the training. A larger one gives the same outputs without SIG; with SIG, elements
            are normalised over the window, which the file does not state.
        rules, tie, strict: As in `plan_conversion`; the layers converted must be those that have positions.
        interpolation: With SIG: "triangle" for their version max, "gaussian" for gauss, which the file does not state.
        version: Without SIG: "v0" (also None, as released) or "v1", which the file does not state either; they
            differ in the order of the axes.
        input_size: As in `convert_`.

    Returns:
        As `convert_`.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    from_file = isinstance(weights, str | Path)
    state = with_names_of(model, read_weights(weights) if isinstance(weights, str | Path) else weights)
    where = f"checkpoint {weights}" if from_file else "the state dict"
    sorted_weights = sort_weights(state, where)
    if sorted_weights is None:
        raise CheckpointError(f"{where}: has no layers of the authors' package, with a P beside the weight")
    source = known_source(model)
    plan = plan_conversion(
        find_convs(model, input_size),
        str(rules) if isinstance(rules, Path) else rules,
        dilated_size=dilated_size,
        kernel_count=sorted_weights.kernel_counts,
        tie=tie,
        interpolation=None if interpolation == INTERPOLATIONS[0] else interpolation,
        strict=strict,
        model=source.name if source else None,
        model_args=source.args if source else None,
    )
    start_from_authors_(model, plan, sorted_weights, version=version)
    return measure_report(model, plan)
