"""Plan many models of the timm and torchvision registries, and show a row for each."""

import fnmatch
import functools
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from ..conversion.open_network import examine, open_network
from ..conversion.plan_network import draft_for_request
from ..conversion.request import NetworkRequest
from ..errors import DclsConvertError, ModelError, NothingMatchesError
from ..geometry import size_text
from ..networks.sites import ModelConvs, count_conv_kinds
from ..networks.source import registry_names
from ..planning.claims import NOT_MATCHED
from ..planning.plan import ConversionPlan
from ..planning.plan_options import PlanOptions
from ..planning.rules import RuleSet
from ..progress import Notify, ignore_messages
from ..records import adapter, write_json
from ..reports.costs import Change, MacsChange, short_before_after
from ..reports.report import predict_report
from ..tables import Table
from ..text import count_text, did_you_mean, one_line, range_text, shortened

Status = Literal["planned", "nothing matches", "does not fit", "failed"]
# Each status, with the style of its rows.
STATUS_STYLES = {"planned": "", "nothing matches": "dim", "does not fit": "yellow", "failed": "red"}
MODELS_PER_WORKER = 8  # at least; fewer would not pay for a worker's import of torch
MAX_REASON = 300  # characters of an exception's message
MAX_KINDS = 4  # number of kinds of convolutions that a row lists if nothing matches


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model, and how a conversion would change it."""

    name: str  # "timm:convnext_tiny"
    status: Status
    reason: str | None = None  # why the status is not "planned"; one line
    input_size: tuple[int, ...] | None = None
    rules: str | None = None  # file or name
    # Kind and size of convolutions -> number of convolutions, most frequent first: "depthwise 7x7"
    # -> 18.
    convolutions: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)  # how many of them would be replaced
    # Reason -> number of convolutions that a rule matches, but which stay as they are.
    kept: dict[str, int] = field(default_factory=dict)
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # distinct values
    growth: int | None = None  # see `ConversionPlan`
    kernel_counts: tuple[int, ...] = ()  # distinct values
    params: Change = field(default_factory=Change)
    macs: MacsChange = field(default_factory=MacsChange)


def names_matching(pattern: str) -> list[str]:
    """Return the names in both registries that match a shell pattern.

    The pattern must match a whole name, with or without the registry's prefix. If no name matches,
    parts of names may match.

    Raises:
        ModelError: No name matches.
    """
    names = registry_names()
    pattern = pattern.lower()
    whole_names = [*fnmatch.filter(names, pattern), *fnmatch.filter(names, f"*:{pattern}")]
    matching = whole_names or fnmatch.filter(names, f"*{pattern}*")
    if not matching:
        bare_names = [name.partition(":")[2] for name in names]
        suggestion = did_you_mean(pattern.rpartition(":")[2].strip("*?["), bare_names, 3)
        raise ModelError(
            f"no model of timm or torchvision matches {shortened(pattern)!r}{suggestion}"
        )
    return list(dict.fromkeys(matching))


def survey(
    names: Sequence[str],
    planning: PlanOptions,
    input_size: Sequence[int] | None = None,
    *,
    workers: int | None = None,
    notify: Notify = ignore_messages,
) -> list[ModelRow]:
    """Plan many models in worker processes. Return a row for every name, in the same order.

    Args:
        names: Names in the registries.
        planning: What to plan for each of them.
        input_size: (channels, *spatial); None for the size that each model states.
        workers: Number of processes; None for one per thread of torch, or fewer for few models.
        notify: Called with the name of each planned model.

    Raises:
        ModelError: A worker process died.
    """
    pool = ProcessPoolExecutor(
        workers or min(torch.get_num_threads(), 1 + len(names) // MODELS_PER_WORKER),
        mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
        initializer=_set_up_worker,
    )
    plan = functools.partial(model_row, planning=planning, input_size=input_size)
    rows: list[ModelRow] = []
    try:
        for row in pool.map(plan, names):
            rows.append(row)
            notify(f"{row.name}, {len(rows)} of {len(names)}", len(rows), len(names))
    except BrokenProcessPool:
        raise ModelError(
            f"{names[len(rows)]} or a model after it: a worker process died, perhaps for "
            "lack of memory; try fewer processes (--jobs 1), or fewer models"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return rows


def _set_up_worker() -> None:
    """Silence a worker, its C code included, and leave Ctrl-C to the parent.

    A worker that Ctrl-C interrupts between two models could hold a lock of the pool for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)


def model_row(
    name: str, planning: PlanOptions, input_size: Sequence[int] | None = None
) -> ModelRow:
    """Plan one model without its weights. An exception becomes the reason in the row."""
    row = ModelRow(name=name, status="planned")
    try:
        request = NetworkRequest(model=name, input_size=input_size)
        network, _ = open_network(
            request, offline=True, notify=ignore_messages, note=ignore_messages
        )
        convs = examine(network, request)
        row = replace(
            row,
            convolutions=dict(count_conv_kinds(convs).most_common()),
            input_size=convs.input_size,
            params=Change(before=convs.params),
            macs=MacsChange(before=convs.macs, note=convs.macs_note),
        )
        plan = draft_for_request(request, planning, convs, network.source).with_counts()
    except NothingMatchesError as error:
        return replace(row, status="nothing matches", reason=str(error))
    except ModelError as error:
        return replace(row, status="failed", reason=str(error))
    except DclsConvertError as error:
        return replace(row, status="does not fit", reason=str(error))
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {one_line(error)[:MAX_REASON]}"
        return replace(row, status="failed", reason=reason)
    return _planned_row(row, plan, convs)


def _planned_row(row: ModelRow, plan: ConversionPlan, convs: ModelConvs) -> ModelRow:
    """Return the row of a model, completed with the changes that its plan makes."""
    report = predict_report(plan)
    replaced: Counter[str] = Counter()
    for layer in plan.layers:
        replaced[f"{layer.kind} {size_text(layer.kernel_size)}"] += 1
    kept: Counter[str] = Counter()
    for skip in plan.skipped:
        if skip not in convs.skipped and not skip.reason.startswith(NOT_MATCHED):
            kept[skip.reason] += 1
    return replace(
        row,
        kept=dict(kept.most_common()),
        replaced=dict(replaced.most_common()),
        dilated_sizes=plan.dilated_sizes,
        growth=plan.growth_of_mixed_kernels,
        kernel_counts=plan.kernel_counts,
        rules=plan.rules,
        params=Change(before=report.params.before, after=report.params.after),
        macs=report.macs,
    )


def survey_view(rows: Sequence[ModelRow]) -> RenderableType:
    """Return a table of the models, and a line that counts them by status."""
    table = Table("Model", "Replaced", "Count", "Parameters", "MACs", words="Replaced")
    for row in rows:
        table.add(
            row.name,
            _replaced_text(row),
            range_text(row.kernel_counts),
            short_before_after(row.params),
            short_before_after(row.macs),
            style=STATUS_STYLES[row.status],
        )
    counts = _status_counts(rows)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return Group(table, Text(), Text(f"{count_text(len(rows), 'model')}: {summary}", style="bold"))


def survey_json(
    rows: Sequence[ModelRow],
    planning: PlanOptions,
    input_size: Sequence[int] | None,
    pattern: str,
) -> str:
    """Return one JSON object with the keys format, options, models and summary."""
    options = asdict(planning)
    if isinstance(planning.rules, RuleSet):
        options["rules"] = planning.rules.source
    summary = {"models": len(rows)}
    for status, count in _status_counts(rows).items():
        summary[status.replace(" ", "_")] = count
    return write_json(
        {
            "format": 1,
            "options": {"pattern": pattern, **options, "input_size": input_size},
            "models": adapter(list[ModelRow]).dump_python(list(rows), mode="json"),
            "summary": summary,
        }
    )


def _status_counts(rows: Sequence[ModelRow]) -> dict[str, int]:
    counts = dict.fromkeys(STATUS_STYLES, 0)
    for row in rows:
        counts[row.status] += 1
    return counts


def _replaced_text(row: ModelRow) -> str:
    """Return "18 depthwise 7x7 → 17x17", or say why nothing is replaced."""
    if row.status == "nothing matches":
        kinds = _kinds_text(dict(list(row.convolutions.items())[:MAX_KINDS]))
        return f"nothing; it has {kinds or 'no convolution at all'}"
    if row.status != "planned":
        return f"{row.status}: {row.reason}"
    replaced = f"{_kinds_text(row.replaced)} → {range_text(row.dilated_sizes, size_text)}"
    if row.growth is not None:
        replaced += f" (+{row.growth})"
    if row.kept:
        replaced += f"; keeps {sum(row.kept.values())}"
    return replaced


def _kinds_text(kinds: dict[str, int]) -> str:
    """Return "18 depthwise 7x7, 3 dense 3x3"."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
