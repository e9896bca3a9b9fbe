"""Name the default output folder of a conversion, and refuse one that exists already."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..atomic_output import check_output
from ..conversion.request import ConversionRequest
from ..geometry import size_text
from ..options import AUTO, ERROR_SCOPE

if TYPE_CHECKING:
    from ..conversion.loaded import LoadedNetwork
    from ..conversion.resolved import ResolvedRequest


def default_output(loaded: "LoadedNetwork", resolved: "ResolvedRequest") -> Path:
    """Return the default output folder: the model's name, the window's size and the start.

    Examples are convnext_tiny-dcls17 and -dcls17x9; efficientnet_b0-dcls-plus2 if kernels of
    several sizes grow by the same number of cells; -dcls if windows differ in another way;
    -dcls17-fit if elements do not start at random, and -dcls17-calibrated after a calibration.
    """
    layers = resolved.plan.layers
    sizes = {layer.dilated_size for layer in layers if not layer.dense_axes}
    if not sizes:
        sizes = {layers[0].dilated_size}
    size = ""
    if resolved.plan.growth_of_mixed_kernels is not None:
        size = f"-plus{resolved.plan.growth_of_mixed_kernels}"
    elif len(sizes) == 1:
        size = _short_size(*sizes)
    start = ""
    if resolved.authors_weights is None:
        start = _start_suffix(loaded.request)
    assert loaded.source is not None
    return folder_of_model(loaded.source.name, f"-dcls{size}{start}")


def folder_of_model(model_name: str, suffix: str) -> Path:
    """Return the model's name, without its registry and folders, with the suffix."""
    _, _, name = model_name.rpartition(":")
    return Path(f"{Path(name).name}{suffix}")


def _start_suffix(request: ConversionRequest) -> str:
    if request.calibration is not None:
        return "-calibrated"
    if request.start == "random":
        return ""
    return f"-{request.start}"


def check_output_named_by_options(request: ConversionRequest, *, force: bool) -> None:
    """Refuse an existing default output whose name follows from the options alone.

    It does if all layers have one size, and the weights cannot come from the authors' package.
    """
    size = request.options.dilated_size
    can_be_known = request.options.rules == AUTO and request.weights is None
    if can_be_known and isinstance(size, int | tuple) and isinstance(request.model, str):
        sides = size if isinstance(size, tuple) else (size,)
        suffix = f"-dcls{_short_size(sides)}{_start_suffix(request)}"
        output = folder_of_model(request.model, suffix)
        if output.exists():
            check_output(output, force=force, reason_to_keep=reason_to_keep_output)


def _short_size(size: tuple[int, ...]) -> str:
    """Return "17" for (17, 17), and "17x9" for (17, 9)."""
    if len(set(size)) == 1:
        return str(size[0])
    return size_text(size)


def check_output_named_by_plan(loaded: "LoadedNetwork", *, force: bool) -> None:
    """Refuse an existing default output before kernels are measured, which may take minutes."""
    from ..conversion.resolved import resolve

    unmeasured = replace(loaded.request.options, scope="model")
    output = default_output(loaded, resolve(loaded, unmeasured))
    check_output(output, force=force, reason_to_keep=reason_to_keep_output)


def measures_kernels(request: ConversionRequest) -> bool:
    """True if planning measures kernels, which may take minutes."""
    return request.calibration is not None or request.options.scope == ERROR_SCOPE


def reason_to_keep_output(path: Path) -> str | None:
    """Say why a checkpoint must not replace this path; None if it may.

    Called only for an existing output, since it imports torch.
    """
    from ..checkpoints.folder import reason_not_a_checkpoint

    return reason_not_a_checkpoint(path)
