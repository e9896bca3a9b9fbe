"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..conversion.request import ConversionRequest
from ..errors import DclsConvertError
from ..geometry import size_text
from ..options import AUTO, DEFAULT_BUDGET
from ..output import check_figure_library, check_output
from ..planning.plan_options import PlanOptions
from ..progress import ignore_messages
from ..text import printable
from . import console, options
from .downloads import limit_waiting
from .parsing import parse_keywords
from .shell_command import shell_command

if TYPE_CHECKING:
    from ..conversion.convert import Conversion

OutputFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Checkpoint to write (default: ./MODEL-dclsSIZE, and -START unless it is random).",
        rich_help_panel=options.OUTPUT,
    ),
]
WithPicture = Annotated[
    bool,
    typer.Option(
        "--picture",
        metavar="",
        help="Add positions.png, a figure of positions and kernels, which the model card shows "
        "(extra plot).",
        rich_help_panel=options.OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar="",
        help="Report only: nothing is written or downloaded.",
        rich_help_panel=options.OUTPUT,
    ),
]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        metavar="",
        count=True,
        show_default=False,
        help="Report every layer, and why others are kept; -vv: also name those.",
        rich_help_panel=options.OUTPUT,
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What is written, and what is printed."""

    output: Path | None  # None for the default name
    picture: bool
    force: bool
    dry_run: bool
    json: bool
    verbose: int
    quiet: bool


def convert(
    context: typer.Context,
    model: options.Model,
    pretrained: options.Pretrained = False,
    checkpoint: options.Weights = None,
    checkpoint_key: options.CheckpointKey = None,
    num_classes: options.NumClasses = None,
    in_chans: options.InChans = None,
    model_kwargs: options.ModelKwargs = None,
    rules: options.Rules = AUTO,
    strict: options.Strict = False,
    plan: options.PlanOption = None,
    dilated_size: options.DilatedSize = AUTO,
    kernel_count: options.KernelCount = AUTO,
    scope: options.ScopeOption = "auto",
    tie: options.TieOption = "stage",
    budget: options.Budget = DEFAULT_BUDGET,
    interpolation: options.InterpolationOption = None,
    calibrate: options.Calibrate = None,
    images: options.ImagesOption = None,
    mean: options.Mean = None,
    std: options.Std = None,
    init: options.InitOption = "auto",
    positions: options.PositionsOption = "normal",
    authors_version: options.AuthorsVersionOption = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    input_size: options.InputSize = None,
    output: OutputFolder = None,
    picture: WithPicture = False,
    force: options.Force = False,
    dry_run: DryRun = False,
    json_: options.Json = False,
    verbose: Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    request = ConversionRequest(
        model=model,
        model_kwargs=parse_keywords(model_kwargs),
        num_classes=num_classes,
        in_chans=in_chans,
        pretrained=pretrained,
        weights=checkpoint,
        checkpoint_key=checkpoint_key,
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
        calibration=calibrate,
        most_images=images,
        mean=mean,
        std=std,
        authors_version=authors_version,
        seed=seed,
        plan_folder=plan,
        command=printable(shlex.join(["dcls-convert", *context.obj])),
        dry_run=dry_run,
        device=device,
    )
    result = OutputOptions(
        output=output,
        picture=picture,
        force=force,
        dry_run=dry_run,
        json=json_,
        verbose=verbose,
        quiet=quiet,
    )
    _check_output_options(result)
    if (pretrained or model.startswith("hf-hub:")) and not dry_run:
        limit_waiting(model)
    _run(request, result)


def _check_output_options(result: OutputOptions) -> None:
    """Refuse options that contradict each other, and a picture that cannot be drawn."""
    if result.quiet and result.verbose:
        raise DclsConvertError("--quiet and --verbose exclude each other")
    if result.picture:
        check_figure_library()


def _run(request: ConversionRequest, result: OutputOptions) -> None:
    """Convert, write the checkpoint, and print the report."""
    if result.output is not None:
        check_output(result.output, force=result.force, reason_to_keep=_reason_to_keep)
    with console.steps(request.model, "loading", quiet=result.quiet) as notify:
        from ..checkpoints.folder import open_checkpoint
        from ..conversion.convert import carry_out
        from ..networks.running import check_device
        from ..reports.report import report_view
        from ..views.next_steps import next_steps

        if request.device is not None:
            request = replace(request, device=str(check_device(request.device)))

        def approve(planned: "Conversion") -> None:
            output = result.output or _default_output(planned)
            check_output(output, force=result.force, reason_to_keep=_reason_to_keep)

        plan = None
        if request.plan_folder is not None:
            plan = open_checkpoint(request.plan_folder).plan
        conversion = carry_out(
            request,
            plan=plan,
            approve=approve,
            notify=notify,
            note=ignore_messages if result.quiet else console.note,
        )
        report = conversion.report
        steps = []
        if not result.dry_run:
            output = result.output or _default_output(conversion)
            notify(f"writing {output}")
            _save(conversion, output, result)
            report = replace(report, output=str(output))
            steps = next_steps(conversion, output)
    if result.json:
        console.write(report.to_json())
    elif result.quiet:
        if report.output is not None:
            console.show_path(report.output)
    else:
        report = replace(report, outcome=None)  # shown by `next_steps`, with the checkpoint
        shown = report_view(
            report,
            verbose=result.verbose,
            cheaper_sizes=_sweep_command(request),
            why_kept="-v says why",
        )
        console.show(shown, *steps)


def _default_output(conversion: "Conversion") -> Path:
    """Return the default output folder: the model's name, the window's size and the start.

    Examples are convnext_tiny-dcls17 and -dcls17x9; efficientnet_b0-dcls-plus2 if kernels of
    several sizes grow by the same number of cells; -dcls if windows differ in another way;
    -dcls17-fit if elements do not start at random, and -dcls17-calibrated after a calibration.
    """
    plan = conversion.plan
    sizes = {layer.dilated_size for layer in plan.layers if not layer.dense_axes}
    if not sizes:
        sizes = {plan.layers[0].dilated_size}
    size = ""
    if plan.growth_of_mixed_kernels is not None:
        size = f"-plus{plan.growth_of_mixed_kernels}"
    elif len(sizes) == 1:
        (sides,) = sizes
        size = size_text(sides)
        if len(set(sides)) == 1:
            size = str(sides[0])
    start = ""
    if conversion.request.calibration is not None:
        start = "-calibrated"
    elif conversion.request.start != "random" and not conversion.takes_authors_elements:
        start = f"-{conversion.request.start}"
    assert conversion.source is not None
    _, _, name = conversion.source.name.rpartition(":")  # without the registry
    return Path(f"{Path(name).name}-dcls{size}{start}")


def _reason_to_keep(path: Path) -> str | None:
    """Say why a checkpoint must not replace this path; None if it may."""
    from ..checkpoints.folder import reason_not_a_checkpoint  # imports torch

    return reason_not_a_checkpoint(path)


def _save(conversion: "Conversion", output: Path, result: OutputOptions) -> None:
    """Write the checkpoint."""
    from ..checkpoints.save import save_just_converted
    from ..views.plot import draw

    assert conversion.model is not None
    model = conversion.model.eval().cpu()
    picture = None
    if result.picture:
        picture = draw(conversion.plan, model.state_dict(), ".png")
    save_just_converted(
        model,
        conversion.plan,
        output,
        report=conversion.report,
        force=result.force,
        picture=picture,
    )


def _sweep_command(request: ConversionRequest) -> str:
    """Return the `sweep` command that shows the costs of other sizes."""
    decide_macs = {
        "num_classes": request.num_classes,
        "in_chans": request.in_chans,
        "model_kwargs": request.model_kwargs,
        "rules": None if request.options.rules == AUTO else request.options.rules,
        "input_size": request.input_size,
    }
    return shell_command(str(request.model), decide_macs, command="sweep")
