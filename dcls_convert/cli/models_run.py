"""`dcls-convert models`: survey many models at once, and print what would become of them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..options import AUTO, Interpolation, PlanOptions, Scope, Tie
from ..planning.budget import parse_percent
from ..planning.planner import check_overruled
from ..planning.rules import RuleSet, load_rules
from ..reports.survey import ModelRow, names_matching, survey_models
from ..reports.survey_view import failure_lines, summary_line, survey_csv, survey_json, survey_view

SECONDS_A_LINE = 10.0  # of progress, where stderr is no terminal
WIDTH_IN_A_FILE = 160  # columns; most rows stay on one line


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsOptions:
    """The options of `models`, parsed; see its help."""

    pattern: str | None
    dilated_size: int | tuple[int, ...] | None
    rules: str
    budget: str
    scope: Scope
    tie: Tie
    interpolation: Interpolation | None
    input_size: tuple[int, ...] | None
    jobs: int | None
    timeout: float
    json: bool
    csv: bool


def run_models(options: ModelsOptions) -> bool:
    """`dcls-convert models [PATTERN]`: whether no model failed."""
    parse_percent(options.budget)
    rules: RuleSet | str = AUTO if options.rules == AUTO else load_rules(options.rules)
    survey = PlanOptions(
        dilated_size=options.dilated_size,
        rules=rules,
        budget=float(options.budget),
        scope=options.scope,
        tie=options.tie,
        interpolation=options.interpolation,
    )
    if isinstance(rules, RuleSet):
        check_overruled(rules, survey)
    names = names_matching(options.pattern)
    with _progress(len(names)) as advance:
        rows = survey_models(
            names,
            survey,
            input_size=options.input_size,
            workers=options.jobs,
            timeout=options.timeout,
            advance=advance,
        )
    if options.json:
        sys.stdout.write(survey_json(rows, survey, pattern=options.pattern, input_size=options.input_size))
    elif options.csv:
        sys.stdout.write(survey_csv(rows))
    else:
        _result_console().print(survey_view(rows))
    if options.json or options.csv:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        for line in [*failure_lines(rows), summary_line(rows)]:
            console.print(Text(line))
    return all(row.status != "failed" for row in rows)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[ModelRow], None]]:
    """On stderr: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield _lines(console, total)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        failed: list[str] = []

        def advance(row: ModelRow) -> None:
            failed.extend([row.name] * (row.status == "failed"))
            seen = f"{row.name}, {len(failed)} failed" if failed else row.name
            progress.update(task, description=f"{seen[:40]:40}", advance=1)

        yield advance


def _lines(console: Console, total: int) -> Callable[[ModelRow], None]:
    done = failed = 0
    printed = time.monotonic()

    def advance(row: ModelRow) -> None:
        nonlocal done, failed, printed
        done += 1
        failed += row.status == "failed"
        if time.monotonic() - printed >= SECONDS_A_LINE:
            printed = time.monotonic()
            console.print(Text(f"models: {done} of {total}" + (f", {failed} failed" if failed else "")))

    return advance


def _result_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, WIDTH_IN_A_FILE))
