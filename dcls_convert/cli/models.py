"""`dcls-convert models`: survey what a conversion would do to many models."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..options import Kind, PlanOptions, Sort
from ..text import count_text, short_list
from . import console
from .completion import complete_models
from .network_options import expand_options
from .shared_options import InputSize, Json
from .typer_options import RUNNING, argument, choice, number

if TYPE_CHECKING:
    from ..choosing.survey import ModelRow

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library
MAX_JOBS = 1024
SECONDS_BETWEEN_LINES = 10.0  # of progress, if stderr is not a terminal
SHOW = "What to show"
PATTERN_HELP = (
    "Names to survey, a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. "
    "Without * ? or [ it is a name or a part of names. "
    "Without a pattern, all models of both registries."
)
KIND_HELP = "Only models in which convolutions of this kind are replaced."
SORT_HELP = (
    "Sort ascending by name, parameters or MACs before conversion, element count, or layers."
)


@expand_options
def models(
    options: PlanOptions,
    pattern: Annotated[str | None, argument("PATTERN", PATTERN_HELP, complete_models)] = None,
    input_size: InputSize = None,
    kind: Annotated[Kind | None, choice(Kind, SHOW, KIND_HELP)] = None,
    sort: Annotated[
        Sort | None, choice(Sort, SHOW, SORT_HELP, show_default="as in the registries")
    ] = None,
    jobs: Annotated[
        int | None,
        number(int, 1, MAX_JOBS, RUNNING, "Worker processes (default: one per CPU).", metavar="N"),
    ] = None,
    json_: Json = False,
) -> None:
    """Show what a conversion would do to each model of the timm and torchvision registries.
    No weights, no download.
    """
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
