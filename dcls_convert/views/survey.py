"""A survey of models as a table for the terminal, and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import get_args

from rich.console import Group, RenderableType
from rich.text import Text

from ..choosing.survey import ModelRow, Status
from ..geometry import size_text
from ..planning.plan_options import PlanOptions
from ..planning.rules import RuleSet
from ..records import adapter, write_json
from ..reports.costs import Change
from ..reports.number_text import short_before_after, short_count
from ..tables import Column, Table
from ..text import count_text, printable, range_text

MAX_KINDS = 4  # number of kinds of convolutions that a row lists if nothing matches
STATUS_STYLES = {"planned": "", "nothing matches": "dim", "does not fit": "yellow", "failed": "red"}


def _status_counts(rows: Iterable[ModelRow]) -> dict[str, int]:
    """Count the models of each status, in the order of `Status`."""
    counts = dict.fromkeys(get_args(Status), 0)
    for row in rows:
        counts[row.status] += 1
    return counts


def summary_line(rows: Sequence[ModelRow]) -> str:
    """Say how many models there are, and how many of each status.

    "does not fit" is left out if there are none.
    """
    parts = []
    for status, count in _status_counts(rows).items():
        if count or status != "does not fit":
            parts.append(f"{count} {status}")
    return f"{count_text(len(rows), 'model')}: {', '.join(parts)}"


def failure_lines(rows: Iterable[ModelRow]) -> list[str]:
    """Return a line for each model that failed, with the reason."""
    lines = []
    for row in rows:
        if row.status == "failed":
            lines.append(printable(f"failed: {row.name}: {row.reason}"))
    return lines


def kept_lines(rows: Iterable[ModelRow]) -> list[str]:
    """Return a line for each model with convolutions that match, but stay, and the first reason."""
    lines = []
    for row in rows:
        if row.kept:
            count = count_text(sum(row.kept.values()), "convolution")
            reason = next(iter(row.kept))
            lines.append(printable(f"{row.name}: keeps {count}: {reason}"))
    return lines


def survey_view(rows: Sequence[ModelRow]) -> RenderableType:
    """Return a table of the models, then lines for what stays and what failed, and the summary."""
    table = Table(SURVEY_COLUMNS, rows, style=lambda row: STATUS_STYLES[row.status])
    failures = [Text(line, style="red") for line in failure_lines(rows)]
    kept = [Text(line, style="yellow") for line in kept_lines(rows)]
    return Group(table, Text(), *kept, *failures, Text(summary_line(rows), style="bold"))


def survey_json(
    rows: Sequence[ModelRow],
    options: PlanOptions,
    *,
    pattern: str | None,
    input_size: tuple[int, ...] | None,
) -> str:
    """Return one JSON object with the keys format, options, models and summary."""
    rules = options.rules
    if isinstance(rules, RuleSet):
        rules = rules.source
    summary = {"models": len(rows)}
    for status, count in _status_counts(rows).items():
        summary[status.replace(" ", "_")] = count
    return write_json(
        {
            "format": 1,
            "options": {
                "pattern": pattern,
                **asdict(options),
                "rules": rules,
                "input_size": input_size,
            },
            "models": [adapter(ModelRow).dump_python(row, mode="json") for row in rows],
            "summary": summary,
        }
    )


def _replaced(row: ModelRow) -> str:
    """Return "18 depthwise 7x7 → 17x17", or say why nothing is replaced.

    If nothing matches, say which convolutions the model has.
    """
    if row.status == "planned":
        replaced = f"{_kinds(row.replaced)} → {range_text(row.dilated_sizes, size_text)}"
        if row.growth is not None:
            replaced += f" (+{row.growth})"
        return replaced
    if row.status == "nothing matches":
        return f"nothing; it has {_kinds(row.convolutions, MAX_KINDS) or 'no convolution at all'}"
    return f"{row.status}: {row.reason}"


def _kinds(kinds: dict[str, int], max_kinds: int | None = None) -> str:
    """Return "18 depthwise 7x7, 3 dense 3x3": the first `max_kinds` kinds, or all for None."""
    listed_kinds = list(kinds.items())[:max_kinds]
    return ", ".join(f"{count} {kind}" for kind, count in listed_kinds)


def _change(change: Change) -> str:
    """Return "4.46 → 4.97 G", or only the count before if nothing is replaced."""
    if change.after is None:
        return short_count(change.before)
    return short_before_after(change)


SURVEY_COLUMNS: list[Column[ModelRow]] = [
    Column("Model", lambda row: row.name),
    Column("Replaced", _replaced, left=True, words=True),
    Column("Count", lambda row: range_text(row.kernel_counts)),
    Column("Parameters", lambda row: row.params, _change),
    Column("MACs", lambda row: row.macs, _change),
]
