"""`dcls-convert models [PATTERN]`. Imports no torch by itself."""

from typing import Annotated

import typer

from ..errors import DclsConvertError
from ..options import AUTO, DEFAULT_BUDGET, Interpolation, Scope, Tie
from .arguments import parse_input_size, parse_integer, parse_size

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library
MOST_JOBS = 1024
MOST_SECONDS = 86_400
DEFAULT_SECONDS = "120"  # the slowest of all models takes two on an idle core


def models(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Names to survey, as a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. Without * ? [ "
            "it is a name, or else a part of names. All models of both registries without it.",
            show_default=False,
        ),
    ] = None,
    dilated_size: Annotated[
        str | None, typer.Option(metavar="N|HxW", help="Window in which elements move; 17 or 17x17.")
    ] = None,
    rules: Annotated[str, typer.Option(metavar="FILE|NAME|auto", help="Rule file, or a built-in set.")] = AUTO,
    budget: Annotated[
        str, typer.Option(metavar="PERCENT", help="Of the replaced weights, for the new kernels.")
    ] = f"{DEFAULT_BUDGET:g}",
    scope: Annotated[Scope, typer.Option(help="For what one count is solved.")] = "model",
    tie: Annotated[Tie, typer.Option(help="Which layers share their positions.")] = "stage",
    interpolation: Annotated[
        Interpolation | None,
        typer.Option(help="How an element spreads over cells.  [default: bilinear]"),
    ] = None,
    input_size: Annotated[
        str | None, typer.Option(metavar="CxHxW", help="For MACs; each model's own without it.")
    ] = None,
    jobs: Annotated[str | None, typer.Option(metavar="N", help="Processes.  [default: as many as processors]")] = None,
    timeout: Annotated[str, typer.Option(metavar="SECONDS", help="For one model.")] = DEFAULT_SECONDS,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
) -> None:
    """What would convert, over the timm and torchvision registries; no weights, no download."""
    if json_ and csv:
        raise DclsConvertError("--json and --csv exclude each other")
    size = parse_size("--dilated-size", dilated_size)
    image = parse_input_size(input_size)
    processes = parse_integer("--jobs", jobs, least=1, most=MOST_JOBS)
    seconds = parse_integer("--timeout", timeout, least=1, most=MOST_SECONDS)
    from .models_run import ModelsOptions, run_models

    clean = run_models(
        ModelsOptions(
            pattern=pattern,
            dilated_size=size,
            rules=rules,
            budget=budget,
            scope=scope,
            tie=tie,
            interpolation=interpolation,
            input_size=image,
            jobs=processes,
            timeout=float(seconds or DEFAULT_SECONDS),
            json=json_,
            csv=csv,
        )
    )
    if not clean:
        raise typer.Exit(EXIT_FAILED)
