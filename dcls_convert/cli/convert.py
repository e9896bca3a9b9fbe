"""`dcls-convert MODEL`: plan, convert, report, and write a folder."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..cli import console, options
from ..errors import DclsConvertError, PlanError
from ..geometry import size_text
from ..options import AUTO, DEFAULT_BUDGET
from .parsing import parse_keywords
from .shell_command import shell_command

if TYPE_CHECKING:
    from ..conversion.convert import Conversion, Prepared
    from ..conversion.request import ConversionRequest
    from ..planning.plan import DraftPlan

OutputFolder = Annotated[
    Path | None,
    options.output_option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Folder to write (default: ./MODEL-dclsSIZE, and -START unless it is random).",
    ),
]
WithPicture = Annotated[
    bool,
    options.output_option(
        "--picture",
        metavar="",
        help="Add positions.png, a figure of positions and kernels, which the model card shows "
        "(extra plot).",
    ),
]
DryRun = Annotated[
    bool,
    options.output_option(
        "--dry-run",
        metavar="",
        help="Report only: nothing is written or downloaded.",
    ),
]
Verbose = Annotated[
    int,
    options.output_option(
        "--verbose",
        "-v",
        metavar="",
        count=True,
        show_default=False,
        help="Show each layer, and why other convolutions are kept; -vv also names them.",
    ),
]


def convert(
    model: options.Model,
    pretrained: options.Pretrained = False,
    weights: options.WeightsFile = None,
    checkpoint_key: options.CheckpointKey = None,
    num_classes: options.NumClasses = None,
    in_chans: options.InChans = None,
    model_kwargs: options.ModelKwargs = None,
    rules: options.Rules = AUTO,
    strict: options.Strict = False,
    plan_folder: options.PlanFolder = None,
    dilated_size: options.DilatedSize = AUTO,
    kernel_count: options.KernelCount = AUTO,
    scope: options.ScopeOption = "auto",
    tie: options.TieOption = "stage",
    budget: options.Budget = DEFAULT_BUDGET,
    interpolation: options.InterpolationOption = None,
    calibration: options.Calibrate = None,
    most_images: options.ImagesOption = None,
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
    """Replace a model's convolutions, report, and write a folder."""
    from ..conversion.request import ConversionRequest, NetworkRequest, StartRequest
    from ..planning.plan_options import PlanOptions

    request = ConversionRequest(
        network=NetworkRequest(
            model=model,
            pretrained=pretrained,
            weights=weights,
            checkpoint_key=checkpoint_key,
            num_classes=num_classes,
            in_chans=in_chans,
            model_kwargs=parse_keywords(model_kwargs),
            input_size=input_size,
            seed=seed,
            device=device,
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
            most_images=most_images,
            mean=mean,
            std=std,
            authors_version=authors_version,
        ),
        plan_folder=plan_folder,
        dry_run=dry_run,
        command=shlex.join(["dcls-convert", *sys.argv[1:]]),
    )
    if quiet and verbose:
        raise DclsConvertError("--quiet and --verbose exclude each other")
    conversion = _convert_and_save(request, output, picture=picture, force=force, quiet=quiet)
    if json_:
        console.write(conversion.report.to_json())
    elif not quiet:
        _show(conversion, verbose)
    elif not dry_run:
        console.write(f"{conversion.report.output}\n")


def _convert_and_save(
    request: "ConversionRequest", output: Path | None, *, picture: bool, force: bool, quiet: bool
) -> "Conversion":
    """Convert, write the folder, and put the folder's path into the report.

    Without `output`, the folder gets its default name.
    """
    from ..output import check_figure_library

    if picture:
        check_figure_library()
    with console.steps(request.network.model, "loading", quiet=quiet) as notify:
        from ..checkpoints.folder import open_folder
        from ..checkpoints.save import check_output
        from ..conversion.convert import finish_, prepare
        from ..running.process_settings import check_device

        if request.network.device is not None:
            check_device(request.network.device)
        adopted = None
        if request.plan_folder is not None:
            adopted = open_folder(request.plan_folder).plan
        prepared = prepare(
            _with_converted_network(request),
            adopted=adopted,
            notify=notify,
            warn=console.note,
            note=console.note,
        )
        if request.dry_run:
            return prepared.predicted()
        folder = output or _default_output(request, prepared)
        check_output(folder, force=force)
        conversion = finish_(prepared, notify=notify, note=console.note)
        notify(f"writing {folder}")
        _save(conversion, folder, force=force, picture=picture)
        report = replace(conversion.report, output=str(folder))
        return replace(conversion, report=report)


def _with_converted_network(request: "ConversionRequest") -> "ConversionRequest":
    """Return the request with the loaded network if MODEL is a folder that dcls-convert wrote."""
    from ..checkpoints.folder import CONFIG, has_plan, open_folder

    name = str(request.network.model)
    folder = Path(name.removeprefix("local-dir:"))
    if not (folder / CONFIG).is_file():
        return request
    if folder.parts == (name,):
        from ..networks.source import REGISTRIES, is_registered

        if any(is_registered(registry, name) for registry in REGISTRIES):
            console.note(f"{name} is taken for the model's name; the folder is ./{name}")
            return request
    if not has_plan(folder):
        return request
    opened = open_folder(folder)
    if opened.plan.folded:
        raise PlanError(f"{folder}: is folded, so it has no elements to give a larger window")
    from ..checkpoints.load import load_converted

    return replace(request, network=replace(request.network, model=load_converted(folder)))


def _save(conversion: "Conversion", output: Path, *, force: bool, picture: bool) -> None:
    from ..checkpoints.save import save_just_converted

    assert conversion.model is not None
    model = conversion.model.eval().cpu()
    figure = None
    if picture:
        from ..views.plot import draw

        figure = draw(conversion.report.plan, model.state_dict(), ".png")
    save_just_converted(model, output, report=conversion.report, force=force, picture=figure)


def _sweep_command(request: "ConversionRequest", draft: "DraftPlan", start_name: str) -> str:
    """Return the command that compares sizes for a network, or for a folder's original network."""
    from ..conversion.request import FROM_CONVERTED
    from ..planning.claims import AUTO_RULES

    network = request.network
    options = replace(request.options, dilated_size=AUTO)
    if start_name == FROM_CONVERTED:
        options = replace(options, tie=draft.tie)
        if draft.rules not in AUTO_RULES:
            options = replace(options, rules=draft.rules)
        kwargs = draft.model_args or None
        network = replace(
            network, model=str(draft.model), model_kwargs=kwargs, input_size=draft.input_size
        )
    return shell_command(network, options, command="sweep")


def _show(conversion: "Conversion", verbose: int) -> None:
    """Print the report and, if a folder was written, the next steps."""
    from ..reports.report import report_view
    from ..views.next_steps import next_steps

    report = conversion.report
    steps = []
    if report.output is not None:
        steps = next_steps(conversion, Path(report.output))
    shown = report_view(
        replace(report, outcome=None),  # `next_steps` shows it
        verbose=verbose,
        cheaper_sizes=_sweep_command(conversion.request, report.plan, conversion.start_name),
        why_kept="-v says why",
    )
    console.show(shown, *steps)


def _default_output(request: "ConversionRequest", prepared: "Prepared") -> Path:
    """Return the default output folder: model, window, stated count or budget, and start.

    Examples are convnext_tiny-dcls17 and -dcls17x9; efficientnet_b0-dcls-plus2 if kernels of
    several sizes grow by the same number of cells; -dcls if windows differ in another way;
    -dcls17-count20 and -dcls17-budget80 if these are stated; -dcls17-fit if elements do not start
    at random, and -dcls17-calibrated after a calibration.
    """
    draft = prepared.draft
    start_name = prepared.start_name
    sizes = {layer.dilated_size for layer in draft.layers if not layer.dense_axes}
    if not sizes:
        sizes = {draft.layers[0].dilated_size}
    size = ""
    if draft.growth_of_mixed_kernels is not None:
        size = f"-plus{draft.growth_of_mixed_kernels}"
    elif len(sizes) == 1:
        (sides,) = sizes
        size = size_text(sides)
        if len(set(sides)) == 1:
            size = str(sides[0])
    counts = ""
    if request.options.kernel_count != AUTO:
        counts = f"-count{request.options.kernel_count}"
    elif draft.share != 1:
        counts = f"-budget{float(100 * draft.share):g}"
    from ..conversion.request import FROM_CONVERTED, FROM_ELEMENTS

    suffix = "" if start_name in ("random", FROM_ELEMENTS, FROM_CONVERTED) else f"-{start_name}"
    if request.start.calibration is not None:
        suffix = "-calibrated"
    path = Path(str(request.network.model).rpartition(":")[2])  # without the registry
    if start_name == FROM_CONVERTED:
        path = path.resolve()  # "." has no name
    return Path(f"{path.name}-dcls{size}{counts}{suffix}")
