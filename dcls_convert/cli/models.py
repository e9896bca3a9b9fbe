"""`dcls-convert models`: show what a conversion would do to many models."""

from typing import Annotated

import typer

from ..cli import console, options
from ..options import AUTO, DEFAULT_BUDGET

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library

Pattern = Annotated[
    str,
    typer.Argument(
        metavar="PATTERN",
        help="Names to survey, a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. "
        "If no whole name matches, a part of names. Default: all models of both registries.",
        show_default=False,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Worker processes (default: as many as torch has threads).",
    ),
]


def models(
    pattern: Pattern = "*",
    rules: options.Rules = AUTO,
    strict: options.Strict = False,
    dilated_size: options.DilatedSize = AUTO,
    kernel_count: options.KernelCount = AUTO,
    tie: options.TieOption = "stage",
    budget: options.Budget = DEFAULT_BUDGET,
    interpolation: options.InterpolationOption = None,
    input_size: options.InputSize = None,
    json_: options.Json = False,
    jobs: Jobs = None,
) -> None:
    """Show what a conversion would do to each model of the timm and torchvision registries.

    This needs no weights and downloads nothing.
    """
    from ..planning.plan_options import PlanOptions

    planning = PlanOptions(
        dilated_size=dilated_size,
        kernel_count=kernel_count,
        rules=rules,
        tie=tie,
        budget=budget,
        interpolation=interpolation,
        strict=strict,
    )
    with console.steps("models") as notify:
        from ..choosing.survey import names_matching, survey, survey_json, survey_view

        rows = survey(names_matching(pattern), planning, input_size, workers=jobs, notify=notify)
    if json_:
        console.write(survey_json(rows, planning, input_size, pattern))
    else:
        console.show(survey_view(rows), wide=True)
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)
