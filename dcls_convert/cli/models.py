"""`dcls-convert models`: survey what a conversion would do to many models."""

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ..conversion.request import refuse_overridden_counts
from ..options import AUTO, DEFAULT_BUDGET, Kind, Sort
from ..planning.plan_options import PlanOptions
from ..text import count_text, short_list
from . import console
from .completion import complete_models
from .options import (
    Budget,
    DilatedSize,
    InputSize,
    InterpolationOption,
    Json,
    KernelCount,
    Rules,
    ScopeOption,
    Strict,
    TieOption,
)

if TYPE_CHECKING:
    from ..choosing.survey import ModelRow

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library
SECONDS_BETWEEN_LINES = 10.0  # of progress, if stderr is not a terminal
SHOW = "What to show"  # groups of options in --help
RUNNING = "How to run"

Pattern = Annotated[
    str | None,
    typer.Argument(
        metavar="PATTERN",
        help="Names to survey, a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. "
        "Text without *, ? or [ is a name, or a part of names. Default: all models of both "
        "registries.",
        autocompletion=complete_models,
        show_default=False,
    ),
]
KindOption = Annotated[
    Kind | None,
    typer.Option(
        "--kind",
        metavar="NAME",
        help="Only models in which convolutions of this kind are replaced: "
        f"{', '.join(get_args(Kind))}.",
        rich_help_panel=SHOW,
    ),
]
SortOption = Annotated[
    Sort | None,
    typer.Option(
        "--sort",
        metavar="NAME",
        help="Sort ascending by name, by params or macs before conversion, by the count of "
        "elements, or by layers (default: as in the registries).",
        rich_help_panel=SHOW,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Worker processes (default: one per CPU).",
        rich_help_panel=RUNNING,
    ),
]


def models(
    pattern: Pattern = None,
    rules: Rules = AUTO,
    strict: Strict = False,
    dilated_size: DilatedSize = AUTO,
    kernel_count: KernelCount = AUTO,
    scope: ScopeOption = "auto",
    tie: TieOption = "stage",
    budget: Budget = DEFAULT_BUDGET,
    interpolation: InterpolationOption = None,
    kind: KindOption = None,
    sort: SortOption = None,
    input_size: InputSize = None,
    json_: Json = False,
    jobs: Jobs = None,
) -> None:
    """Show what a conversion would do to each model of the timm and torchvision registries.

    No weights, no download.
    """
    options = PlanOptions(
        dilated_size=dilated_size,
        kernel_count=kernel_count,
        rules=rules,
        scope=scope,
        tie=tie,
        budget=budget,
        interpolation=interpolation,
        strict=strict,
    )
    refuse_overridden_counts(options)
    all_rows = _survey(pattern, options, input_size=input_size, workers=jobs)
    from ..choosing.survey import filter_and_sort_rows
    from ..views.survey import failure_lines, summary_line, survey_json, survey_view

    rows = filter_and_sort_rows(all_rows, sort=sort, kind=kind)
    if json_:
        console.write(survey_json(rows, options, pattern=pattern, input_size=input_size))
        for line in [*failure_lines(rows), summary_line(rows)]:
            console.message(line)
    elif rows:
        console.show(survey_view(rows), wide=True)
    else:
        names = short_list(row.name for row in all_rows)
        count = count_text(len(all_rows), "model")
        console.show(f"No {kind} convolution is replaced in {count} ({names}).")
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _survey(
    pattern: str | None,
    options: PlanOptions,
    *,
    input_size: tuple[int, ...] | None,
    workers: int | None,
) -> list["ModelRow"]:
    """Return a row for each model whose name matches the pattern, and show progress."""
    with console.steps("models", every=SECONDS_BETWEEN_LINES) as notify:
        from ..choosing.survey import names_matching, survey_models
        from ..planning.claims import refuse_overridden_options
        from ..planning.rules import RuleSet

        if isinstance(options.rules, RuleSet):  # a rule file or set, not auto
            refuse_overridden_options(options.rules, options)  # once, not in every model
        names = names_matching(pattern)
        done = 0
        failed = 0

        def advance(row: "ModelRow") -> None:
            nonlocal done, failed
            done += 1
            text = f"{row.name}, {done} of {len(names)}"
            if row.status == "failed":
                failed += 1
            if failed:
                text += f", {failed} failed"
            notify(text, done, len(names))

        return survey_models(names, options, input_size=input_size, workers=workers, on_row=advance)
