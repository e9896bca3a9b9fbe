"""What would become of the models of timm's and torchvision's registries: a row of plain values for
each."""

import fnmatch
import functools
import gc
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..depthwise.geometry import size_text
from ..errors import DclsConvertError, ModelError, NothingMatchesError, did_you_mean, shown
from ..networks.sites import kinds_of_convs
from ..networks.source import ModelSource, registry_names
from ..options import Kind, PlanOptions, Sort
from ..pipeline import Job
from ..reports.report import Change, MacsChange, predict_report
from .workers import run_jobs

Status = Literal["planned", "nothing matches", "does not fit", "failed"]
WILDCARDS = "*?["
MODELS_A_WORKER = 8  # fewer are not worth the seconds in which a worker imports torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model, and what would become of it."""

    name: str  # "timm:convnext_tiny"
    status: Status
    reason: str | None = None  # one line; None where it is planned
    input_size: tuple[int, ...] | None = None
    rules: str | None = None  # file or name
    convolutions: dict[str, int] = field(
        default_factory=dict
    )  # "depthwise 7x7" -> 18, the most frequent first
    replaced: dict[str, int] = field(default_factory=dict)  # those of them that would be replaced
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # all that occur
    kernel_counts: tuple[int, ...] = ()  # all that occur
    params: Change = field(default_factory=Change)
    macs: MacsChange = field(default_factory=MacsChange)


def names_matching(pattern: str | None) -> list[str]:
    """Names of both registries; without wildcards the pattern is a name, or else a part of
    names."""
    known = registry_names()
    if pattern is None:
        return known
    lower = pattern.lower()
    prefix, colon, part = lower.rpartition(":")
    is_plain = lower and not set(lower) & set(WILDCARDS)
    for each in [lower, f"{prefix}{colon}*{part}*"] if is_plain else [lower]:
        names = [
            n
            for n in known
            if any(fnmatch.fnmatchcase(x.lower(), each) for x in (n, n.partition(":")[2]))
        ]
        if names:
            return names
    bare = part.strip("".join(WILDCARDS))
    near = did_you_mean(bare, (name.partition(":")[2] for name in known), 3)
    raise ModelError(f"no model of timm or torchvision matches {shown(pattern)!r}{near}")


def model_row(
    name: str, options: PlanOptions, input_size: tuple[int, ...] | None = None
) -> ModelRow:
    """Plan one model without its weights, at the input size that it states if none is given."""
    job = Job(source=ModelSource(name=name), options=options, input_size=input_size, offline=True)
    row = ModelRow(name=name, status="planned")
    try:
        convs = job.convs
        row = replace(
            row,
            convolutions=dict(kinds_of_convs(convs).most_common()),
            input_size=convs.input_size,
            params=Change(before=convs.params),
            macs=MacsChange(before=convs.macs, note=convs.macs_note),
        )
        plan = job.plan()
    except DclsConvertError as error:
        statuses: dict[type, Status] = {
            ModelError: "failed",
            NothingMatchesError: "nothing matches",
        }
        return replace(row, status=statuses.get(type(error), "does not fit"), reason=str(error))
    report = predict_report(plan)
    replaced = Counter(f"{layer.kind} {size_text(layer.kernel_size)}" for layer in plan.layers)
    return replace(
        row,
        replaced=dict(replaced.most_common()),
        dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
        kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
        rules=plan.rules,
        params=Change(before=report.params.before, after=report.params.after),
        macs=report.macs,
    )


def survey_models(
    names: Sequence[str],
    options: PlanOptions,
    *,
    input_size: tuple[int, ...] | None = None,
    workers: int | None = None,
    timeout: float | None = None,
    advance: Callable[[ModelRow], None] = lambda row: None,
) -> list[ModelRow]:
    """A row for every name, in their order; `advance` gets each as soon as it is ready."""
    processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = workers or max(1, min(processors, len(names) // MODELS_A_WORKER))
    work = functools.partial(model_row, options=options, input_size=input_size)
    rows: dict[int, ModelRow] = {}
    for index, value, failure in run_jobs(
        work, names, workers=workers, timeout=timeout, set_up=set_up_worker
    ):
        rows[index] = value or ModelRow(name=names[index], status="failed", reason=failure)
        advance(rows[index])
    return [rows[index] for index in range(len(names))]


def chosen_rows(
    rows: Sequence[ModelRow], *, sort: Sort | None = None, kind: Kind | None = None
) -> list[ModelRow]:
    """Rows of which convolutions of this kind are replaced, or that failed; sorted, with unknown
    values last."""
    if kind is not None:
        rows = [
            row
            for row in rows
            if row.status == "failed" or kind in {name.split()[0] for name in row.replaced}
        ]
    if sort is None:
        return list(rows)
    value: Callable[[ModelRow], Any] = {
        "name": lambda row: row.name.partition(":")[2],
        "params": lambda row: row.params.before,
        "macs": lambda row: row.macs.before,
        "count": lambda row: max(row.kernel_counts, default=None),
        "layers": lambda row: sum(row.replaced.values()) or None,
    }[sort]
    return sorted(rows, key=lambda row: (value(row) is None, value(row)))


def set_up_worker() -> None:
    """For a process that surveys one model after another: imports, one thread."""
    torch.set_num_threads(
        1
    )  # there is a process for every core, and tensors on meta compute nothing
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    registry_names()  # imports timm and torchvision
    gc.collect()
    gc.freeze()  # what was imported stays; searching it again after every model would take time
