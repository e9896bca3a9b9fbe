"""Convert a model in memory: the main functions of the library."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from ..errors import check_argument
from ..options import (
    AUTO,
    DEFAULT_BUDGET,
    AuthorsVersion,
    Init,
    InterpolationName,
    Positions,
    Scope,
    Tie,
)
from ..planning.plan_options import PlanArguments, PlanOptions
from ..planning.rules import RuleSet
from ..progress import logger, show_progress_in_python
from ..reports.report import ConversionReport
from ..running.arguments import ExampleInputs
from ..starts.images import Calibration, Images
from .convert import carry_out
from .request import (
    ConversionRequest,
    NetworkRequest,
    StartRequest,
)


def convert_(
    model: nn.Module,
    *,
    dilated_size: int | Sequence[int] | str = AUTO,
    kernel_count: int | Literal["auto", "exact"] = AUTO,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    scope: Scope = AUTO,
    tie: Tie = "stage",
    budget: float | str = DEFAULT_BUDGET,
    interpolation: InterpolationName | None = None,
    strict: bool = False,
    init: Init = "auto",
    positions: Positions = "normal",
    calibration: Images | Calibration | None = None,
    held_out: Images | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    input_size: Sequence[int] | None = None,
    example_inputs: ExampleInputs | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> ConversionReport:
    """Replace the matching convolutions of `model` by DCLS layers, in place, and report the costs.

    If the model is converted already, its layers get other windows: state `dilated_size` alone.
    Parameters stay the same objects. With bilinear elements, outputs do not change.

    Args:
        model: Any module; its device, dtype, mode, hooks and frozen parameters stay as they are.
        dilated_size: Size of the window in which elements may move, for rules that do not set it:
            one number of cells for all sides, one per side, or a growth such as "+4" (four cells
            more per axis than the kernel). "auto" takes the largest growth that adds at most 15 %
            to the model's MACs, with windows of at most 17, of which at least half fit their maps.
            If no growth does, "auto" takes "+2".
        kernel_count: Elements per kernel, for rules that do not set it. "auto" solves for the
            budget; "exact" uses one element per cell of the old kernel.
        rules: A rule set, the name of a built-in one, a file, or a mapping with the keys of a file.
            "auto" takes the first of "depthwise", "conv3x3", "dense3x3x3" and "conv1d" that
            matches.
        scope: "model" gives all layers one kernel count. "error" spends the same budget where
            kernels need it most. "auto" is "error" with a calibration, "model" without.
        tie: "stage" shares positions among layers of the same stage and shape; "none" gives every
            layer its own.
        budget: Parameters that new weights, positions and sigmas may use, in percent of the
            replaced weights: 80 or "80%".
        interpolation: How an element spreads over the cells, for rules that do not set it:
            "bilinear" (same as None), "triangle" or "gaussian".
        strict: Raise an error for a matching convolution that cannot take the size, instead of
            skipping it.
        init: "auto" is "fit". "fit" chooses the elements whose kernels are closest to the model's
            own; "largest" takes the cells with the most energy over the kernel's tie group;
            "random" draws random positions, as the paper does to train from scratch; "exact" puts
            one element on each cell of the old kernel, which keeps the outputs but needs more
            parameters.
        positions: For init="random": "normal" is N(0, 0.5 cells), "kernel" is uniform over the old
            kernel, "uniform" over the window. If the input size is known, "uniform" stays within
            the cells that can meet the feature map.
        calibration: For init="fit": images, as in `read_calibration_images`, or its result.
            Elements are then fitted so that the outputs, not the kernels, stay close.
        held_out: Images on which outputs are compared, as in `read_calibration_images`; not images
            of the calibration. None takes every fifth image of the calibration.
        mean, std: Normalisation of a folder of images, as in `read_calibration_images`.
        input_size: (channels, rows, columns) at which MACs are counted. None takes the size that a
            timm model states.
        example_inputs: For a network that takes anything but one image, or values of a certain
            range: what forward is called with, of any dtype, with the batch axis. A tensor, a tuple
            of tensors, or a dict of keyword arguments. The plan keeps shapes, dtypes and ranges.
        seed: Seed of random positions. The global generator is not touched.
        progress: Show progress on stderr if the work takes more than two seconds: a bar with the
            time left on a terminal, otherwise lines. None shows it only on a terminal and in a
            notebook.

    Returns:
        The report, with `report.layers[0].kernel_count`,
        `report.params.after` and so on. `save_converted(model, report.plan, folder)` writes a
        folder.

    Raises:
        DclsConvertError: Something does not fit, or options exclude each other. The message is one
            line, and the model is unchanged.
    """
    check_argument("model", model, nn.Module)
    request = ConversionRequest(
        network=NetworkRequest(
            model=model, input_size=input_size, example_inputs=example_inputs, seed=seed
        ),
        options=PlanOptions(
            dilated_size=dilated_size,
            kernel_count=kernel_count,
            rules=rules,
            scope=scope,
            tie=tie,
            budget=budget,
            interpolation=interpolation,
            strict=strict,
        ),
        start=StartRequest(
            init=init,
            positions=positions,
            calibration=calibration,
            held_out=held_out,
            mean=mean,
            std=std,
        ),
    )
    with show_progress_in_python(type(model).__name__, progress) as notify:
        return carry_out(
            request,
            notify=notify,
            warn=_warn,
            note=logger.info,
        ).report


def convert_from_authors_(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    version: AuthorsVersion | None = None,
    input_size: Sequence[int] | None = None,
    example_inputs: ExampleInputs | None = None,
    **options: Unpack[PlanArguments],
) -> ConversionReport:
    """Convert `model` in place and give it the weights of a network of the authors' package.

    The converted model has the same outputs as that network.

    Args:
        model: The unconverted network, such as `timm.create_model("convnext_tiny")`.
        weights: A state dict whose layers have `weight` (O, I, E) and `P` (axes, O, I, E), or a
            file with this state dict. It may use the names of the original ConvNeXt. It decides
            the elements and their count.
        rules: As in `convert_`. The converted layers must be exactly the layers that have a `P`.
        version: For weights without SIG: "v0" (as released, same as None) or "v1". The versions
            differ in the order of the axes.
        input_size, example_inputs: As in `convert_`.
        options: dilated_size, tie, interpolation and strict, as in `convert_`. The weights state
            neither the window used in training nor the interpolation. Without SIG, a larger window
            gives the same outputs, and the interpolation is "bilinear" (same as None). With SIG,
            the interpolation is "triangle" for the authors' version "max" and "gaussian" for
            "gauss"; both normalise elements over the window.

    Returns:
        The report, as from `convert_`.

    Raises:
        DclsConvertError: Something does not fit. The message is one line, and the model is
            unchanged.
    """
    check_argument("model", model, nn.Module)
    request = ConversionRequest(
        network=NetworkRequest(
            model=model,
            weights=weights if isinstance(weights, Mapping) else Path(weights),
            input_size=input_size,
            example_inputs=example_inputs,
        ),
        options=PlanOptions(rules=rules, **options),
        start=StartRequest(needs_authors_elements=True, authors_version=version),
    )
    return carry_out(request, warn=_warn, note=logger.info).report


def _warn(message: str) -> None:
    # The user calls a public function, which calls `carry_out`, `prepare` and this function.
    warnings.warn(message, stacklevel=5)
