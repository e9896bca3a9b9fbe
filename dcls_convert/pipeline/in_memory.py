"""Convert a model in memory: the library's front door."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import CheckpointError
from ..fitting.images import Calibration, Images
from ..networks.find_convs import check_module
from ..networks.initialisation import have_torch_default_init
from ..options import (
    AUTO,
    DEFAULT_BUDGET,
    AuthorsVersion,
    Init,
    InterpolationName,
    PlanOptions,
    Positions,
    Scope,
    Tie,
    suggests_arguments,
)
from ..planning.known_counts import LayerCounts
from ..planning.rules import RuleSet
from ..progress import show_to_python
from ..reports.report import ConversionReport
from .conversion import convert_network_
from .loaded import LoadedNetwork
from .request import ConversionRequest
from .resolved import resolve


@suggests_arguments
def convert_(
    model: nn.Module,
    *,
    dilated_size: int | Sequence[int] | str = AUTO,
    kernel_count: int | Literal["auto", "exact"] | LayerCounts = AUTO,
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
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_size: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> ConversionReport:
    """Replace the matching convolutions of `model` by DCLS layers, in place, and report the costs.

    Args:
        model: Any module; its device, dtype, mode, hooks and frozen parameters stay as they are.
        dilated_size: Window in which elements move, for rules that state none: cells of all sides,
            of each side, or a growth such as "+4", four cells more on each axis than the kernel
            has. "auto" takes the largest growth, with windows of 17 at most, that adds at most 15 %
            to the model's MACs; "+2" if every growth adds more.
        kernel_count: Elements in a kernel, for rules that state none. "auto" solves for the budget;
            "exact" takes as many as the old kernel has cells.
        rules: A rule set, its name, file, or a mapping with the keys of a file. "auto" takes
            depthwise convolutions, or 3x3 ones where there are none.
        scope: What one count is solved for: the "model", each "stage" or each "layer" (a tie group
            counts as one layer). "error" spends the same budget where kernels need it. "auto" is
            "error" with a calibration, else "model".
        tie: "stage" shares positions among layers of one stage and shape; "none" gives every layer
            its own.
        budget: Percent of the replaced weights that new weights, positions and sigmas may use: 80
            or "80%".
        interpolation: How an element spreads over the cells, for rules that state none: "bilinear"
            (also None), "triangle" or "gaussian".
        strict: Refuse a matching convolution that cannot take the size, instead of skipping it.
        init: "auto" is "fit", with a warning if the kernels are as torch initialises them. "fit"
            starts from the elements whose kernels are closest to the model's own; "largest" from
            the cells of every kernel with the most energy over its tie group; "random" from random
            positions, as the paper trains from scratch; "exact" gives every kernel as many elements
            as it had cells, at their places, so that the outputs stay as they are at more
            parameters.
        positions: For "random": "normal" is N(0, 0.5 cells), "kernel" is uniform over the old
            kernel, "uniform" over the window. If the input size is known, "uniform" stays within
            the cells that can meet the feature map.
        calibration: For "fit": images, as in `calibrate`, or its result; elements are then fitted
            to keep the outputs, not the kernels.
        held_out: As in `calibrate`: images to compare outputs on. None takes every fifth image of
            the calibration.
        mean, std: As in `calibrate`, for a folder of images.
        input_size: (channels, rows, columns) for MACs; without it, the size that a timm model
            states.
        seed: For random positions, and for where fits start. The global generator is not touched.
        progress: Show on stderr what is being done, if it takes more than two seconds: a bar with
            the time left on a terminal, else lines. None shows it on a terminal and in a notebook.

    Returns:
        The report, measured on the converted model. `report.layers[0].kernel_count`,
        `report.params.after` and so on; `save_converted(model, report.plan, folder)` writes a
        checkpoint.

    Raises:
        DclsConvertError: With one line that says what does not fit, or which options exclude each
            other; the model is then unchanged.
    """
    check_module(model)
    request = ConversionRequest(
        model=model,
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
        input_size=input_size,
        init=init,
        positions=positions,
        calibration=calibration,
        held_out=held_out,
        mean=mean,
        std=std,
        seed=seed,
    )
    with show_to_python(type(model).__name__, progress) as notify:
        loaded = LoadedNetwork(request, notify=notify)
        resolved = resolve(loaded)
        if resolved.init == "fit" and init == AUTO:
            warn_if_untrained(model, [layer.name for layer in resolved.plan.layers])
        return convert_network_(loaded, resolved).report


def warn_if_untrained(model: nn.Module, names: Iterable[str]) -> None:
    """Warn if the default start would fit new layers to untrained kernels.

    Call it directly from a function that `suggests_arguments` decorates: the warning names the line
    that called the decorated function.

    Args:
        model: Unconverted.
        names: Names of the convolutions to convert.
    """
    kernels = []
    for name in names:
        weight = dict(model.get_submodule(name).named_parameters(recurse=False)).get("weight")
        if weight is None:  # parametrised, pruned or normed, which no new model is
            return
        kernels.append(weight)
    if have_torch_default_init(kernels):
        warnings.warn(
            "the model's kernels are as torch initialises them, untrained, and the new layers are "
            "fitted to them; init='random' starts as the paper does, init='fit' keeps them and "
            "does not warn",
            stacklevel=4,  # beyond this function, its caller and the caller's decorator
        )


@suggests_arguments
def convert_from_authors_(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    dilated_size: int | Sequence[int] | str = AUTO,
    kernel_count: int | Literal["auto", "exact"] | LayerCounts = AUTO,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    scope: Scope = AUTO,
    tie: Tie = "stage",
    budget: float | str = DEFAULT_BUDGET,
    interpolation: InterpolationName | None = None,
    strict: bool = False,
    version: AuthorsVersion | None = None,
    input_size: Sequence[int] | None = None,
) -> ConversionReport:
    """Convert `model` in place to a network of the authors' package, with the same outputs.

    Args:
        model: The unconverted network, such as `timm.create_model("convnext_tiny")`.
        weights: A state dict whose layers have `weight` (O, I, E) and `P` (axes, O, I, E), or the
            file that holds it. Names may be those of the original ConvNeXt. Elements and their
            count come from here.
        dilated_size, rules, tie, strict: As in `convert_`. The layers converted must be those that
            have positions. The file does not state the window of the training; without SIG, a
            larger window gives the same outputs.
        interpolation: Not stated in the file either. With SIG, elements are normalised over
            the window, and it is "triangle" for their version max and "gaussian" for gauss; without
            SIG, it is "bilinear" (also None).
        kernel_count, scope, budget: Decided by the weights; omit them.
        version: Without SIG: "v0" (also None, as released) or "v1", which differ in the order of
            the axes.
        input_size: As in `convert_`.

    Returns:
        The report, measured on the converted model, as from `convert_`.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    check_module(model)
    request = ConversionRequest(
        model=model,
        weights=weights if isinstance(weights, Mapping) else Path(weights),
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
        input_size=input_size,
        authors_version=version,
    )
    loaded = LoadedNetwork(request)
    if loaded.authors_weights is None:
        raise CheckpointError(
            f"{request.weights_name}: has no layers of the authors' package, "
            "with a P beside the weight"
        )
    return convert_network_(loaded, resolve(loaded)).report
