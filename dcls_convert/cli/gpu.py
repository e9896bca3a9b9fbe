"""`dcls-convert gpu`: whether matrix products are right and fast on the user's GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..atomic_output import check_output, new_file, reason_not_a_file
from ..conversion.request import ConversionRequest
from ..options import WHAT_TO_CONVERT, PlanOptions
from . import console
from .completion import complete_models
from .shared_options import MODEL_HELP, Force, InputSize
from .typer_options import (
    OUTPUT,
    RUNNING,
    SECONDS_PER_DAY,
    argument,
    number,
    option,
    parse_window_or_auto,
)

if TYPE_CHECKING:
    from ..compare.gpu_report import GpuReport

DEFAULT_SECONDS = 180
DEFAULT_OUTPUT = Path("dcls-convert-gpu.json")
WINDOW = option(
    WHAT_TO_CONVERT,
    "Window: a size, a growth, or auto.",
    metavar="SIZE",
    parser=parse_window_or_auto,
)
TIME = number(
    int, 1, SECONDS_PER_DAY, RUNNING, "After this time, no measurement is begun.", metavar="N"
)
DEVICE_HELP = "Device: cuda:1, mps; cpu tries the command with small batches."


def gpu(
    model: Annotated[str, argument("MODEL", MODEL_HELP, complete_models)] = "convnext_tiny",
    dilated_size: Annotated[Any, WINDOW] = "17",
    device: Annotated[
        str | None, option(RUNNING, DEVICE_HELP, metavar="NAME", show_default="cuda")
    ] = None,
    seconds: Annotated[int, TIME] = DEFAULT_SECONDS,
    output: Annotated[
        Path, option(OUTPUT, "JSON file of the results.", "--output", "-o", metavar="FILE")
    ] = DEFAULT_OUTPUT,
    input_size: InputSize = None,
    force: Force = False,
) -> None:
    """Check depthwise layers on a GPU, and time a network there: original, converted and folded.

    Takes about three minutes by default. Every line is printed and stored as soon as it is
    measured. The last one is advice: keep the package's choice of algorithms, or override it.
    """
    check_output(output, force=force, reason_to_keep=reason_not_a_file)
    with console.steps(model, "building") as notify:
        from ..compare.gpu_check import GpuCheck, gpu_device
        from ..conversion.loaded import LoadedNetwork
        from ..views.gpu import measurement_line

        chosen_device = gpu_device(device)
        options = PlanOptions(dilated_size=dilated_size)
        request = ConversionRequest(model=model, options=options, input_size=input_size)
        check = GpuCheck(LoadedNetwork(request, notify=notify), chosen_device, seconds)
    report = check.report()
    console.show(f"{report.model} on {report.device}, torch {report.torch}, {report.dtype}")
    for row in check.measure():
        _write(check.report(), output, force=force or len(check.rows) > 1)
        console.show(measurement_line(row))
    report = check.report()
    _write(report, output, force=True)
    if report.not_begun:
        console.note(
            f"{report.not_begun} measurements were not begun in {seconds} seconds; "
            "--seconds gives more time"
        )
    console.show("", *report.choices, "", report.verdict)
    console.message(f"{model}: wrote {output}; please attach it to an issue")


def _write(report: "GpuReport", output: Path, *, force: bool) -> None:
    with new_file(output, force=force) as partial:
        partial.write_text(report.to_json(), encoding="utf-8")
