"""`dcls-convert models`: what would become of many models at once."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import Kind, PlanOptions, Sort
from . import console
from .arguments import Csv, InputSize, Json, argument, number, option, refuse, with_records
from .completion import complete_models

if TYPE_CHECKING:
    from ..compare.survey import ModelRow

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library
MOST_JOBS = 1024
MOST_SECONDS = 86_400
SECONDS_A_MODEL = 120  # the slowest of all models takes two seconds on an idle core
SECONDS_A_LINE = 10.0  # of progress, where stderr is no terminal
RUNNING = "How to run"
SHOW = "What to show"
PATTERN_HELP = (
    "Names to survey, a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. Without * ? or [ it is a name, "
    "or else a part of names. Without a pattern, all models of both registries."
)
KIND_HELP = "Only models of which such convolutions are replaced."
SORT_HELP = "The least first: before conversion, or elements and layers of the new kernels."


@with_records
def models(
    options: PlanOptions,
    pattern: Annotated[str | None, argument("PATTERN", PATTERN_HELP, complete_models)] = None,
    input_size: InputSize = None,
    kind: Annotated[Kind | None, option(SHOW, KIND_HELP)] = None,
    sort: Annotated[
        Sort | None, option(SHOW, SORT_HELP, show_default="as in the registries")
    ] = None,
    jobs: Annotated[
        int | None,
        number(int, 1, MOST_JOBS, RUNNING, "Processes; one a processor without it.", metavar="N"),
    ] = None,
    timeout: Annotated[
        float, number(int, 1, MOST_SECONDS, RUNNING, "Limit for one model.", metavar="SECONDS")
    ] = SECONDS_A_MODEL,
    json_: Json = False,
    csv: Csv = False,
) -> None:
    """Show what would convert, over the timm and torchvision registries. No weights, no download."""
    refuse((json_ and csv, "--json and --csv exclude each other"))
    with console.steps("models", every=SECONDS_A_LINE) as notify:
        from ..compare.survey import chosen_rows, names_matching, survey_models
        from ..planning.claims import check_overruled
        from ..planning.rules import RuleSet
        from ..views.survey import failure_lines, summary_line, survey_csv, survey_json, survey_view

        if isinstance(options.rules, RuleSet):  # a rule file or set, not auto
            check_overruled(options.rules, options)  # once, not in every model
        names = names_matching(pattern)
        done: Counter[bool] = Counter()  # of models, by whether they failed

        def advance(row: "ModelRow") -> None:
            done[row.status == "failed"] += 1
            failures = f", {done[True]} failed" if done[True] else ""
            notify(
                f"{row.name}, {done.total()} of {len(names)}{failures}", done.total(), len(names)
            )

        rows = survey_models(
            names,
            options,
            input_size=input_size,
            workers=jobs,
            timeout=float(timeout),
            advance=advance,
        )
    rows = chosen_rows(rows, sort=sort, kind=kind)
    if json_ or csv:
        data = (
            survey_json(rows, options, pattern=pattern, input_size=input_size)
            if json_
            else survey_csv(rows)
        )
        console.write(data)
        for line in [*failure_lines(rows), summary_line(rows)]:
            console.message(line)
    else:
        console.show(survey_view(rows), wide=True)
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)
