"""`dcls-convert models`: what would become of many models at once."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import DclsConvertError, printable
from ..options import AUTO, PlanOptions
from . import console
from .arguments import OUTPUT, InputSize, Json, number, with_plan_options

if TYPE_CHECKING:
    from ..reports.survey import ModelRow

EXIT_FAILED = 1  # a model that fails is a bug, here or in its library
MOST_JOBS = 1024
MOST_SECONDS = 86_400
SECONDS_A_MODEL = 120  # the slowest of all models takes two seconds on an idle core
SECONDS_A_LINE = 10.0  # of progress, where stderr is no terminal
WIDTH_IN_A_FILE = 160  # columns; most rows stay on one line
RUNNING = "How to run"


@with_plan_options
def models(
    options: PlanOptions,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Names to survey, as a shell pattern: 'convnext_*', 'timm:resnet*', 'torchvision:*'. Without * ? or [ "
            "it is a name, or else a part of names. Without a pattern, all models of both registries.",
            show_default=False,
        ),
    ] = None,
    input_size: InputSize = None,
    jobs: Annotated[
        int | None,
        number(int, 1, MOST_JOBS, metavar="N", rich_help_panel=RUNNING, help="Processes; one a processor without it."),
    ] = None,
    timeout: Annotated[
        float, number(int, 1, MOST_SECONDS, metavar="SECONDS", rich_help_panel=RUNNING, help="Limit for one model.")
    ] = SECONDS_A_MODEL,
    json_: Json = False,
    csv: Annotated[bool, typer.Option("--csv", rich_help_panel=OUTPUT, help="Print CSV.")] = False,
) -> None:
    """Show what would convert, over the timm and torchvision registries. No weights, no download."""
    if json_ and csv:
        raise DclsConvertError("--json and --csv exclude each other")
    from ..reports.survey import names_matching, survey_models
    from ..reports.survey_view import failure_lines, summary_line, survey_csv, survey_json, survey_view

    options = _with_rules(options)
    names = names_matching(pattern)
    with _progress(len(names)) as advance:
        rows = survey_models(
            names, options, input_size=input_size, workers=jobs, timeout=float(timeout), advance=advance
        )
    if json_:
        console.write(survey_json(rows, options, pattern=pattern, input_size=input_size))
    elif csv:
        console.write(survey_csv(rows))
    else:
        console.show(survey_view(rows), least_width=WIDTH_IN_A_FILE)
    if json_ or csv:
        for line in [*failure_lines(rows), summary_line(rows)]:
            console.message(line)
    if any(row.status == "failed" for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _with_rules(options: PlanOptions) -> PlanOptions:
    """The rules read once, and options refused that they overrule in every model."""
    from ..planning.planner import check_overruled
    from ..planning.rules import load_rules

    if options.rules == AUTO:
        return options
    rules = load_rules(options.rules)
    check_overruled(rules, options)
    return replace(options, rules=rules)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[["ModelRow"], None]]:
    """On stderr: a bar on a terminal, a line now and then elsewhere."""
    done = failed = 0
    printed = time.monotonic()

    def line(row: "ModelRow") -> None:
        nonlocal done, failed, printed
        done, failed = done + 1, failed + (row.status == "failed")
        if time.monotonic() - printed >= SECONDS_A_LINE:
            printed = time.monotonic()
            console.message(f"models: {done} of {total}" + (f", {failed} failed" if failed else ""))

    def bar(row: "ModelRow") -> None:
        nonlocal failed
        failed += row.status == "failed"
        seen = printable(row.name) + (f", {failed} failed" if failed else "")
        progress.update(task, description=f"{seen[:40]:40}", advance=1)

    terminal = Console(stderr=True, highlight=False)
    if not terminal.is_terminal:
        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=terminal, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield bar
