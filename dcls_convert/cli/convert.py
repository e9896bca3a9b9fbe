"""`dcls-convert MODEL`: plan, convert, report, and write a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckpointError, DclsConvertError, listed
from ..options import AUTO, EXACT, AuthorsVersion, Init, PlanOptions, Positions
from . import console
from .arguments import (
    MOST_COUNT,
    MOST_SEED,
    OUTPUT,
    WHAT,
    WHERE,
    Force,
    InputSize,
    Json,
    Quiet,
    number,
    with_plan_options,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..networks.source import ModelSource
    from ..planning.plan import ConversionPlan
    from ..reports.report import ConversionReport
    from ..surgery.authors import AuthorsWeights
    from .pipeline import Conversion, Start


@with_plan_options
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="convnext_tiny (timm first, then torchvision), timm:NAME, torchvision:NAME, hf-hub:REPO, "
            "local-dir:FOLDER, or package.module:factory, which imports and runs your own code.",
        ),
    ],
    options: PlanOptions,
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained", rich_help_panel=WHAT, help="Start from timm's or torchvision's trained weights."),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=WHAT,
            help="Start from the weights in a safetensors or torch file, also one of DCLS's authors.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=WHAT,
            help="Carry out the plan of a checkpoint, on other weights of the same model.",
        ),
    ] = None,
    num_classes: Annotated[
        int | None, number(int, 0, MOST_COUNT, metavar="N", rich_help_panel=WHAT, help="Classes of the model's head.")
    ] = None,
    in_chans: Annotated[
        int | None, number(int, 1, MOST_COUNT, metavar="N", rich_help_panel=WHAT, help="Input channels.")
    ] = None,
    init: Annotated[
        Init,
        typer.Option(
            rich_help_panel=WHERE,
            help="random; fit: closest to the old kernels; largest: at their largest cells; exact: at all cells, for the "
            "same outputs at more parameters; auto: fit for trained weights, else random.",
        ),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", rich_help_panel=WHERE, help="Images: fit the outputs for them, not the kernels."),
    ] = None,
    positions: Annotated[
        Positions, typer.Option(rich_help_panel=WHERE, help="Random positions: N(0, 0.5 cells), or uniform.")
    ] = "normal",
    authors_version: Annotated[
        AuthorsVersion | None,
        typer.Option(
            rich_help_panel=WHERE,
            show_default="v0, as released",
            help="Version of the authors' layers in a checkpoint of theirs without SIG.",
        ),
    ] = None,
    seed: Annotated[
        int, number(int, 0, MOST_SEED, metavar="N", rich_help_panel=WHERE, help="Seed of all random values.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", rich_help_panel=OUTPUT, show_default="./MODEL-dclsSIZE", help="Checkpoint to write."
        ),
    ] = None,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Report only: no weights, no download.")
    ] = False,
    input_size: InputSize = None,
    json_: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Report a row for every layer.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Replace a model's convolutions, report, and write a checkpoint."""
    trained = pretrained or checkpoint is not None
    _refuse_output_conflicts(dry_run, force, output, json_, verbose, quiet)
    _refuse_start_conflicts(options, init, positions, calibrate, trained, dry_run)
    for conflict, message in [
        (pretrained and checkpoint is not None, "--pretrained and --checkpoint exclude each other"),
        (
            authors_version is not None and checkpoint is None,
            "--authors-version says of which version a file is: it needs --checkpoint",
        ),
        (
            plan is not None and (options != PlanOptions() or input_size is not None),
            "--plan carries out a plan as it is: leave the options that make one",
        ),
    ]:
        if conflict:
            raise DclsConvertError(message)
    from ..checkpoints.folder import check_output, save_converted
    from ..networks.source import build_model, rebuildable_source, resolve_model
    from ..networks.weights import check_weights_file
    from ..reports.report import predict_report
    from .pipeline import Start, build_with_weights, carry_out_

    if checkpoint is not None:
        check_weights_file(checkpoint)
    if output is not None and not dry_run:
        check_output(output, force=force)
    ...
