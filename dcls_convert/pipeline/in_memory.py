"""Convert a model in memory: the library's front door."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..fitting.images import Calibration, Images
from ..options import AuthorsVersion, Init, PlanOptions, Positions, takes_plan_options
from ..progress import SECONDS_UNSEEN, Notify, is_stderr_watched, show_progress, silent
from ..reports.report import ConversionReport
from .conversion import convert_network
from .loaded import LoadedNetwork
from .request import ConversionRequest
from .resolved import resolve


@takes_plan_options
def convert_(
    model: nn.Module,
    *,
    init: Init = "auto",
    positions: Positions = "normal",
    calibration: Images | Calibration | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_size: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **planning: Any,
) -> ConversionReport:
    """Replace the matching convolutions of `model` by DCLS layers, in place, and report the costs.

    Args:
        model: Any module; its device, dtype, mode, hooks and frozen parameters stay as they are.
        init: "fit" (also "auto") starts from the elements whose kernels are closest to the model's
            own; "largest" from the cells of every kernel with the most energy over its tie group;
            "random" from random positions, as the paper trains from scratch; "exact" gives every
            kernel as many elements as it had cells, at their places, so that the outputs stay as
            they are at more parameters.
        positions: For "random": "normal" is N(0, 0.5 cells), "kernel" is uniform over the old
            kernel, "uniform" over the window.
        calibration: For "fit": images, as in `calibrate`, or what it gave; the outputs then count
            instead of the kernels.
        mean, std: As in `calibrate`, for a folder of images.
        input_size: (channels, rows, columns) for MACs; without it, the size that a timm model
            states.
        seed: For random positions. The global generator is not touched.
        progress: Show on stderr what is being done, if it takes more than two seconds: a bar with
            the time left on a terminal, else lines. None shows it on a terminal and in a notebook.
        planning: dilated_size, kernel_count, rules, scope, tie, budget, interpolation and strict,
            as in `plan_conversion`. With a calibration, the scope "auto" is "error".

    Returns:
        The report, measured on the converted model. `report.layers[0].kernel_count`,
        `report.params.after` and so on; `save_converted(model, report.plan, folder)` writes a
        checkpoint.

    Raises:
        DclsConvertError: With one line that says what does not fit, or which options exclude each
            other; the model is then unchanged.
    """
    request = ConversionRequest(
        model=model,
        options=PlanOptions(**planning),
        input_size=input_size,
        init=init,
        positions=positions,
        calibration=calibration,
        mean=mean,
        std=std,
        seed=seed,
    )
    shows_progress = is_stderr_watched() if progress is None else progress
    display: contextlib.AbstractContextManager[Notify] = contextlib.nullcontext(silent)
    if shows_progress:
        display = show_progress(type(model).__name__, wait=SECONDS_UNSEEN)
    with display as notify:
        loaded = LoadedNetwork(request, notify=notify)
        return convert_network(loaded, resolve(loaded)).report


@takes_plan_options
def convert_from_authors_(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    version: AuthorsVersion | None = None,
    input_size: Sequence[int] | None = None,
    **planning: Any,
) -> ConversionReport:
    """Convert `model` in place to a network of the authors' package, with the same outputs.

    Args:
        model: The unconverted network, such as `timm.create_model("convnext_tiny")`.
        weights: A state dict whose layers have `weight` (O, I, E) and `P` (axes, O, I, E), or the
            file that holds it. Names may be those of the original ConvNeXt. Elements and their
            count come from here.
        version: Without SIG: "v0" (also None, as released) or "v1", which differ in the order of
            the axes.
        input_size: As in `convert_`.
        planning: dilated_size, rules, tie, interpolation and strict, as in `plan_conversion`. The
            layers converted must be those that have positions. The file does not state the window
            and the interpolation of the training. With SIG, elements are normalised over the
            window, and interpolation is "triangle" for their version max and "gaussian" for gauss;
            without SIG, a larger window gives the same outputs.

    Returns:
        The report, measured on the converted model, as from `convert_`.

    Raises:
        DclsConvertError: With one line that says what does not fit; the model is then unchanged.
    """
    request = ConversionRequest(
        model=model,
        weights=weights if isinstance(weights, Mapping) else Path(weights),
        options=PlanOptions(**planning),
        input_size=input_size,
        authors_version=version,
    )
    loaded = LoadedNetwork(request)
    if loaded.elements is None:
        raise CheckpointError(
            f"{request.weights_name}: has no layers of the authors' package, "
            "with a P beside the weight"
        )
    return convert_network(loaded, resolve(loaded)).report
