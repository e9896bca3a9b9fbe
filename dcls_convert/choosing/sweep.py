"""Compare windows, with counts or budgets, for one network; recommend the window of "auto"."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from ..conversion.open_network import examine, open_network
from ..conversion.plan_network import cautions, draft_for_request
from ..conversion.request import NetworkRequest
from ..errors import CheckpointError, PlanError, check_argument
from ..geometry import plain_numbers, size_text
from ..options import (
    AUTO,
    MAX_ADDED_COST_PERCENT,
    MAX_WINDOW,
    MIN_GROWTH,
    InterpolationName,
    Tie,
)
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..planning.plan_options import PlanOptions
from ..planning.rules import RuleSet
from ..progress import Note, Notify, ignore_messages, show_progress_in_python
from ..records import Record
from ..reports.costs import Change, MacsChange, in_one_unit, percent, with_separators
from ..reports.report import predict_report
from ..running.arguments import ExampleInputs
from ..tables import Table, as_html, as_text, indented, title
from ..text import counts_text, range_text
from ..weights.loading import check_weights

RequestedSize = int | Sequence[int] | str  # cells, or a growth such as "+4"
CANDIDATE_COUNT = 9  # number of windows that `candidate_windows` returns
RECOMMENDED = ">"  # in front of the recommended row
WHY = (
    f"`auto` takes this window: the largest growth that adds at most {MAX_ADDED_COST_PERCENT:g} % "
    f"to the MACs, makes no window larger than {MAX_WINDOW}, and lets at least half of the windows "
    "fit their maps, or else the smallest growth"
)
TRAINING = (
    "Only training shows the accuracy: a network that is trained already gains nothing until it "
    "is trained further. In the paper, with images of 224x224, ConvNeXt was worse below 17x17 and "
    "no better above; "
    "ResNet-50 used 7x7."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A window, with a count or a budget."""

    size: RequestedSize  # `dilated_size` of the planning options
    kernel_count: int | None = None  # None: solved for the budget
    budget: float | None = None  # percent; None for the default, or if a count is given


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination, or the original. A value that is None or empty is unknown."""

    asked: Combination | None  # None for the original
    status: Literal["original", "done", "does not fit"]
    reason: str | None = None  # why it does not fit; one line
    command: str | None = None  # command line that converts with it; None from Python
    layers: int = 0  # number of layers replaced
    layers_beyond_map: int = 0  # number of layers whose windows have cells that never meet the map
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # distinct values, sorted
    kernel_counts: tuple[int, ...] = ()  # distinct values, sorted
    elements: int | None = None  # in all kernels
    params: int | None = None  # of the whole model
    macs: int | None = None  # of the whole model, for one image

    @property
    def window(self) -> str:
        """The window as text: "17x17"; "7x7..9x9" for several; "+4 (7x7..9x9)" for a growth.

        If nothing was planned, the requested size.
        """
        if self.asked is None:
            return "original"
        asked = self.asked.size
        planned = range_text(self.dilated_sizes, size_text)
        if planned and isinstance(asked, str):
            return f"{asked} ({planned})"
        if planned:
            return planned
        if isinstance(asked, int | str):
            return str(asked)
        return size_text(asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended size."""

    row: int | None = None  # index of the row; None if no row has the size that "auto" takes
    why: str  # the reason, in words
    command: str | None = None  # of the row


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Record):
    """All rows, the original first."""

    format: int = 1
    model: str
    input_size: tuple[int, ...] | None
    macs_note: str | None = None  # why MACs are unknown, or what they omit
    rows: tuple[SweepRow, ...]
    choice: Recommendation

    def __rich__(self) -> RenderableType:
        input_size = ""
        if self.input_size:
            input_size = f", input {size_text(self.input_size)}"
        heading = title(self.model, input_size)
        return Group(heading, Text(), _table(self), Text(), *_notes(self))

    __str__ = as_text
    _repr_html_ = as_html


def sweep(
    model: nn.Module,
    sizes: Sequence[RequestedSize] | None = None,
    *,
    counts: Sequence[int] | None = None,
    budgets: Sequence[float] | None = None,
    rules: str | Path | Mapping[str, Any] | RuleSet = AUTO,
    tie: Tie = "stage",
    interpolation: InterpolationName | None = None,
    strict: bool = False,
    input_size: Sequence[int] | None = None,
    example_inputs: ExampleInputs | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Compare windows, and counts or budgets, by parameters and MACs. The model is not changed.

    Args:
        model: An unconverted network.
        sizes: Windows in cells, as one integer or one per side, or growths such as "+4". None tries
            windows from the kernels' own extent on, or growths if kernels differ in extent.
        counts: Elements per kernel. None: as many as the budget allows.
        budgets: Percent of the replaced weights, such as (60, 80, 100), instead of counts.
        rules, tie, interpolation, strict: See `convert_`.
        input_size, example_inputs: See `convert_`. If they are unknown, so are the MACs.
        progress: See `convert_`.

    Returns:
        A row for each combination, the original first, and a recommendation: the row with the
        window that `convert_` takes by default. Notebooks and `print` show a table.

    Raises:
        DclsConvertError: An argument does not fit; one line says which. A size that does not fit
            does not raise: its row has the reason.
    """
    sizes, counts, budgets = map(plain_numbers, (sizes, counts, budgets))
    for name, values in {"sizes": sizes, "counts": counts, "budgets": budgets}.items():
        if isinstance(values, str | int | float):
            raise PlanError(f"{name}={values!r} must be a list, such as [{values!r}]")
    check_argument("model", model, nn.Module)
    network = NetworkRequest(model=model, input_size=input_size, example_inputs=example_inputs)
    options = PlanOptions(rules=rules, tie=tie, interpolation=interpolation, strict=strict)
    with show_progress_in_python(type(model).__name__, progress) as notify:
        return make_sweep(network, options, sizes, counts, budgets, notify=notify)


def make_sweep(
    request: NetworkRequest,
    options: PlanOptions,
    sizes: Sequence[RequestedSize] | None,
    counts: Sequence[int] | None,
    budgets: Sequence[float] | None,
    *,
    command: Callable[[Combination], str | None] = lambda asked: None,
    notify: Notify = ignore_messages,
    note: Note = ignore_messages,
) -> Sweep:
    """Plan every size with every count, or with every budget, and recommend the size of "auto".

    Args:
        request: The network.
        options: The planning options that all combinations share.
        sizes, counts, budgets: See `sweep`.
        command: Returns the command line that converts with a combination.
        notify: Called with the name of each step.
        note: Called with each note for the user.

    Raises:
        CheckpointError: The weights already have elements.
        DclsConvertError: The network cannot be planned even with the size "auto".
    """
    if counts is not None and budgets is not None:
        raise PlanError("counts and budgets exclude each other")
    network, weights = open_network(request, offline=True, notify=notify, note=note)
    if weights is not None and weights.elements:
        raise CheckpointError(
            f"{weights.where}: has elements of its own, so there is nothing to compare"
        )
    notify("finding convolutions")
    convs = examine(network, request)

    def make_plan(options: PlanOptions) -> ConversionPlan:
        return draft_for_request(request, options, convs, network.source).with_counts()

    auto_plan = make_plan(options)
    if weights is not None:
        check_weights(
            network.examined, weights.entries, weights.where, optional=weights.new_classifier
        )
    for caution in cautions(auto_plan):
        note(caution)
    rows = [SweepRow(asked=None, status="original", params=auto_plan.params, macs=auto_plan.macs)]
    sizes = sizes or candidate_windows(auto_plan.layers)
    combinations = []
    for size, count, budget in itertools.product(sizes, counts or (None,), budgets or (None,)):
        combinations.append(Combination(size=size, kernel_count=count, budget=budget))
    for number, asked in enumerate(combinations, 1):
        notify(f"planning {number} of {len(combinations)}")
        rows.append(_row(make_plan, options, asked, command(asked)))
    return Sweep(
        model=network.name,
        input_size=auto_plan.input_size,
        macs_note=auto_plan.macs_note,
        rows=tuple(rows),
        choice=_recommend(rows, auto_plan),
    )


def candidate_windows(layers: Sequence[LayerPlan]) -> list[int] | list[str]:
    """Return CANDIDATE_COUNT windows for these kernels, each two cells larger than the previous.

    If all kernels have the same extent, the windows are sizes that begin with this extent.
    Otherwise the windows are growths that begin with "+2".
    """
    extents: set[int] = set()
    for layer in layers:
        extents.update(layer.learnt_extents)
    if len(extents) == 1:
        (extent_of_all,) = extents
        return list(range(extent_of_all, extent_of_all + 2 * CANDIDATE_COUNT, 2))
    return [f"+{MIN_GROWTH + 2 * index}" for index in range(CANDIDATE_COUNT)]


def _row(
    make_plan: Callable[[PlanOptions], ConversionPlan],
    options: PlanOptions,
    asked: Combination,
    command: str | None,
) -> SweepRow:
    """Plan a combination, and return its row."""
    changes: dict[str, Any] = {"dilated_size": asked.size}
    if asked.kernel_count is not None:
        changes["kernel_count"] = asked.kernel_count
    if asked.budget is not None:
        changes["budget"] = asked.budget
    try:
        plan = make_plan(replace(options, **changes))
    except PlanError as error:
        return SweepRow(asked=asked, status="does not fit", reason=str(error), command=command)
    report = predict_report(plan)
    return SweepRow(
        asked=asked,
        status="done",
        command=command,
        layers=len(plan.layers),
        layers_beyond_map=report.layers_beyond_map,
        dilated_sizes=plan.dilated_sizes,
        kernel_counts=plan.kernel_counts,
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
    )


def _recommend(rows: Sequence[SweepRow], auto_plan: ConversionPlan) -> Recommendation:
    """Recommend the row with the windows of "auto".

    If several rows have these windows, take the row with the most parameters that adds none, or
    else the row with the fewest parameters.
    """
    same_windows = [row for row in rows if row.dilated_sizes == auto_plan.dilated_sizes]
    if not same_windows:
        windows = range_text(auto_plan.dilated_sizes, size_text)
        return Recommendation(why=f"auto takes {windows}, which is not in the table")
    no_more_params = [row for row in same_windows if _params(row) <= _params(rows[0])]
    if no_more_params:
        best = max(no_more_params, key=_params)
    else:
        best = min(same_windows, key=_params)
    return Recommendation(row=rows.index(best), why=WHY, command=best.command)


def _params(row: SweepRow) -> int:
    assert row.params is not None
    return row.params


def _table(sweep: Sweep) -> Table:
    original = sweep.rows[0]
    write_macs, macs_unit = in_one_unit(row.macs for row in sweep.rows)
    layer_counts = {row.layers for row in sweep.rows if row.status == "done"}
    table = Table(
        "  Window",
        "Count",
        "Budget",
        "Layers",
        "Off map",
        "Parameters",
        f"MACs{macs_unit}",
        "",
    )
    for index, row in enumerate(sweep.rows):
        sign = RECOMMENDED if index == sweep.choice.row else ""
        budget = None
        if row.asked is not None and row.asked.budget is not None:
            budget = f"{row.asked.budget:g} %"
        layers = None
        if len(layer_counts) > 1 and row.layers:
            layers = str(row.layers)
        macs = None
        if row.macs is not None:
            macs = write_macs(row.macs)
        added_macs = ""
        if row is not original:
            added_macs = percent(Change(before=original.macs, after=row.macs), 1)
        table.add(
            f"{sign:1} {row.window}",
            range_text(row.kernel_counts),
            budget,
            layers,
            str(row.layers_beyond_map or ""),
            row.status if row.params is None else with_separators(row.params),
            macs,
            added_macs,
            style="yellow" if row.status == "does not fit" else "",
        )
    return table


def _notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield notes that explain the rows, and the recommendation."""
    misfits = {row.window: row.reason for row in sweep.rows if row.reason is not None}
    for window, reason in misfits.items():
        yield indented(f"{window} does not fit: {reason}", "yellow")
    if sweep.macs_note:
        macs = MacsChange(before=sweep.rows[0].macs, note=sweep.macs_note)
        yield indented(macs.note_sentence)
    yield indented(TRAINING)
    why = sweep.choice.why
    if sweep.choice.row is None:
        yield indented(f"No size is recommended: {why}.")
    else:
        row = sweep.rows[sweep.choice.row]
        elements = counts_text(row.kernel_counts, "element")
        yield indented(f"{RECOMMENDED} Take {row.window} with {elements}. {why}.", "bold")
