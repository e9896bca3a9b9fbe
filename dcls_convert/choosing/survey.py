"""Survey what a conversion would change in each model of the timm and torchvision registries."""

import fnmatch
import gc
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..conversion.decide import plan_network
from ..conversion.load import load
from ..conversion.request import ConversionRequest
from ..errors import DclsConvertError, ModelError, NothingMatchesError
from ..geometry import size_text
from ..networks.registries import registry_names
from ..networks.sites import count_conv_kinds
from ..options import Kind, Sort
from ..planning.claims import NOT_MATCHED
from ..planning.paths import WILDCARDS
from ..planning.plan_options import PlanOptions
from ..reports.costs import Change, MacsChange
from ..reports.predict import predict_report
from ..text import did_you_mean, one_line, shortened

Status = Literal["planned", "nothing matches", "does not fit", "failed"]
MIN_MODELS_PER_WORKER = 8  # for fewer, a worker's import of torch takes too long
MAX_REASON = 300  # characters of an exception's message


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model, and how a conversion would change it."""

    name: str  # "timm:convnext_tiny"
    status: Status
    reason: str | None = None  # why the status is not "planned"; one line
    input_size: tuple[int, ...] | None = None
    rules: str | None = None  # file or name
    # Kind and size of convolutions -> their number, most frequent first: "depthwise 7x7" -> 18.
    convolutions: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)  # how many of them would be replaced
    # Reason -> number of convolutions that a rule matches, but which stay as they are.
    kept: dict[str, int] = field(default_factory=dict)
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # distinct values
    growth: int | None = None  # see `ConversionPlan`
    kernel_counts: tuple[int, ...] = ()  # distinct values
    params: Change = field(default_factory=Change)
    macs: MacsChange = field(default_factory=MacsChange)


def names_matching(pattern: str | None) -> list[str]:
    """Return the names in both registries that match a pattern, or all names for None.

    A pattern without wildcards must be a whole name or, if no such name exists, a part of names.
    Case is ignored, and the registry's prefix may be omitted.

    Raises:
        ModelError: No name matches.
    """
    names = registry_names()
    if pattern is None:
        return names
    lower = pattern.lower()
    prefix, colon, part = lower.rpartition(":")
    patterns = [lower]
    if lower and WILDCARDS.isdisjoint(lower):
        patterns.append(f"{prefix}{colon}*{part}*")
    for candidate in patterns:
        matching = [name for name in names if _matches(name, candidate)]
        if matching:
            return matching
    bare_pattern = part.strip("".join(WILDCARDS))
    suggestion = did_you_mean(bare_pattern, map(_bare_name, names), 3)
    raise ModelError(f"no model of timm or torchvision matches {shortened(pattern)!r}{suggestion}")


def _matches(name: str, pattern: str) -> bool:
    """True if a name, with or without the registry's prefix, matches a lower-case pattern."""
    if fnmatch.fnmatchcase(name.lower(), pattern):
        return True
    return fnmatch.fnmatchcase(_bare_name(name).lower(), pattern)


def _bare_name(name: str) -> str:
    """ "timm:convnext_tiny" -> "convnext_tiny"."""
    return name.partition(":")[2]


def model_row(
    name: str, options: PlanOptions, input_size: tuple[int, ...] | None = None
) -> ModelRow:
    """Plan one model without its weights, by default at the model's own input size."""
    request = ConversionRequest(model=name, options=options, input_size=input_size, dry_run=True)
    row = ModelRow(name=name, status="planned")
    try:
        loaded, _ = load(request)
        convs = loaded.convs
        row = replace(
            row,
            convolutions=dict(count_conv_kinds(convs).most_common()),
            input_size=convs.input_size,
            params=Change(before=convs.params),
            macs=MacsChange(before=convs.macs, note=convs.macs_note),
        )
        plan = plan_network(loaded, None, options)
    except DclsConvertError as error:
        return replace(row, status=_status_of(error), reason=str(error))
    report = predict_report(plan)
    replaced: Counter[str] = Counter()
    dilated_sizes = set()
    kernel_counts = set()
    for layer in plan.layers:
        replaced[f"{layer.kind} {size_text(layer.kernel_size)}"] += 1
        dilated_sizes.add(layer.dilated_size)
        kernel_counts.add(layer.kernel_count)
    kept: Counter[str] = Counter()
    site_names = {site.name for site in convs.sites}
    for skip in plan.skipped:
        if skip.name in site_names and not skip.reason.startswith(NOT_MATCHED):
            kept[skip.reason] += 1
    return replace(
        row,
        kept=dict(kept.most_common()),
        replaced=dict(replaced.most_common()),
        dilated_sizes=tuple(sorted(dilated_sizes)),
        growth=plan.growth_of_mixed_kernels,
        kernel_counts=tuple(sorted(kernel_counts)),
        rules=plan.rules,
        params=Change(before=report.params.before, after=report.params.after),
        macs=report.macs,
    )


def _status_of(error: DclsConvertError) -> Status:
    if type(error) is ModelError:
        return "failed"
    if type(error) is NothingMatchesError:
        return "nothing matches"
    return "does not fit"


def survey_models(
    names: Sequence[str],
    options: PlanOptions,
    *,
    input_size: tuple[int, ...] | None = None,
    workers: int | None = None,
    on_row: Callable[[ModelRow], None] = lambda row: None,
) -> list[ModelRow]:
    """Plan many models in worker processes. Return a row for every name, in the same order.

    Args:
        names: Names in the registries.
        options: Planning options.
        input_size: Size of the inputs; None for each model's own.
        workers: Number of processes. The default is one per core, or fewer for few models.
        on_row: Called with each row as soon as it is ready.
    """
    if not workers:
        workers = max(1, min(_available_cores(), len(names) // MIN_MODELS_PER_WORKER))
    pool = ProcessPoolExecutor(
        min(workers, len(names)),
        mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
        initializer=set_up_worker,
    )
    rows: dict[str, ModelRow] = {}
    try:
        name_of = {}
        for name in names:
            name_of[pool.submit(row_or_failure, name, options, input_size)] = name
        for future in as_completed(name_of):
            try:
                row = future.result()
            except BrokenProcessPool:
                reason = "a worker process died (out of memory?)"
                row = ModelRow(name=name_of[future], status="failed", reason=reason)
            rows[row.name] = row
            on_row(row)
    finally:
        pool.shutdown(cancel_futures=True)
    return [rows[name] for name in names]


def row_or_failure(
    name: str, options: PlanOptions, input_size: tuple[int, ...] | None = None
) -> ModelRow:
    """Plan one model as `model_row` does. If its code raises, the row says what."""
    try:
        return model_row(name, options, input_size)
    except BaseException as error:  # even SystemExit fails this model only
        reason = f"{type(error).__name__}: {one_line(error)[:MAX_REASON]}"
        return ModelRow(name=name, status="failed", reason=reason)


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def filter_and_sort_rows(
    rows: Sequence[ModelRow], *, sort: Sort | None = None, kind: Kind | None = None
) -> list[ModelRow]:
    """Filter and sort the rows to show.

    Args:
        rows: All rows.
        sort: Value to sort by, unknown values last; None keeps the order.
        kind: Keep only rows in which a convolution of this kind is replaced, and rows that failed.
    """
    if kind is not None:
        rows = [row for row in rows if row.status == "failed" or _replaces(row, kind)]
    if sort is None:
        return list(rows)
    value_of = SORT_VALUES[sort]
    return sorted(rows, key=lambda row: (value_of(row) is None, value_of(row)))


def _replaces(row: ModelRow, kind: Kind) -> bool:
    for convolution in row.replaced:  # "depthwise 7x7"
        if convolution.split()[0] == kind:
            return True
    return False


SORT_VALUES: dict[Sort, Callable[[ModelRow], Any]] = {
    "name": lambda row: _bare_name(row.name),
    "params": lambda row: row.params.before,
    "macs": lambda row: row.macs.before,
    "count": lambda row: max(row.kernel_counts, default=None),
    "layers": lambda row: sum(row.replaced.values()) or None,
}


def set_up_worker() -> None:
    """Prepare a worker that plans one model after another.

    It prints nothing, and leaves Ctrl-C to its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)  # there is a worker per core, and meta tensors compute nothing
    registry_names()  # imports timm and torchvision
    gc.collect()
    gc.freeze()  # garbage collection need not scan the imported modules again for every model
