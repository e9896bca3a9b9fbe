"""The report of a conversion: a record with its JSON, its view in a terminal, and Markdown."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import check_argument
from ..geometry import size_text
from ..networks.sites import Skipped
from ..options import MAX_ADDED_COST_PERCENT, MIN_GROWTH
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..records import Record, as_json
from ..running.input_spec import inputs_text
from ..tables import Table, as_html, as_text, indented
from ..text import count_text, counts_text, printable, shortened
from .cost_tables import cost_table, has_shared_positions, model_table, windows_text
from .costs import (
    BudgetReport,
    MacsChange,
    ParamsChange,
    before_after,
    macs_of,
    macs_of_model,
    params_of,
    percent,
    short_before_after,
)
from .outcome import Outcome, outcome_sentences
from .sentences import report_sentences

COSTLY_MACS_PERCENT = 50.0  # added MACs, in percent; beyond it the first line is red
# Attributes of a layer in the JSON.
LAYER_KEYS = (
    *("name", "stage", "kind", "kernel_size", "dilated_size", "kernel_count", "interpolation"),
    *("tie_group", "params_before", "params_after", "weight_params", "position_params"),
    *("macs_before", "macs_after", "fit_error", "output_error"),
)
KEYS_IF_STATED = ("outcome", "not_measured", "overruled", "notes")  # absent from the JSON if empty


@dataclass(frozen=True, kw_only=True, repr=False)
class ConversionReport(Record):
    """The changes that a plan makes and, after a conversion, its results; also the JSON.

    The parameters of the layers and `params_untouched` sum to `params`; MACs sum likewise.
    """

    format: int = 1
    model: str | None  # None for a module that only its user can build
    input_size: tuple[int, ...] | None  # (channels, *spatial) of one image
    output: str | None = None  # the folder; None if nothing was written
    params: ParamsChange
    macs: MacsChange
    budget: BudgetReport  # of a folded model, before folding
    layers: tuple[LayerPlan, ...]  # the converted convolutions; with errors, once they have values
    skipped: tuple[Skipped, ...]  # the convolutions that stay as they are, and why
    stages_from: str  # how the stages were found
    params_untouched: int  # parameters outside of the layers
    macs_untouched: int | None
    outcome: Outcome | None = None  # None for an untrained network, or before a conversion
    folded: bool  # whether plain convolutions have replaced the layers
    # Number of layers whose windows have cells that never meet the map, at the input size.
    layers_beyond_map: int
    # Why the network's use of its convolutions was not measured; None if it was measured.
    not_measured: str | None
    # One sentence for each rule that lets outputs see inputs which they did not see before.
    overruled: tuple[str, ...]
    notes: tuple[str, ...]  # what users should know about the new layers
    plan: Annotated[ConversionPlan, Field(exclude=True)]  # not in the JSON

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = as_json(self)
        data["layers"] = [_layer_row(layer) for layer in self.layers]
        for key in KEYS_IF_STATED:
            if not data[key]:
                del data[key]
        return data

    def __rich__(self) -> RenderableType:
        return report_view(self)

    __repr__ = as_text
    _repr_html_ = as_html


def _layer_row(layer: LayerPlan) -> dict[str, Any]:
    """Return a layer's entry in the JSON."""
    row: dict[str, Any] = {}
    for key in LAYER_KEYS:
        value = getattr(layer, key)
        row[key] = list(value) if isinstance(value, tuple) else value
    if layer.grow:
        row["grow"] = list(layer.grow)
    return row


def predict_report(plan: ConversionPlan) -> ConversionReport:
    """Return the report of a plan that has not been carried out; no weights are needed."""
    check_argument("plan", plan, ConversionPlan)
    return report_of(plan)


def report_of(plan: ConversionPlan, outcome: Outcome | None = None) -> ConversionReport:
    """Return the report of a plan; layers have errors only after they were given values."""
    layers = plan.layers
    params_untouched = plan.params - sum(layer.params_before for layer in layers)
    macs_untouched = None
    if plan.macs is not None:
        macs_untouched = plan.macs - (macs_of(layers).before or 0)
    exact_count = None
    if plan.budget.exact_count is not None:
        # Round down, so that 34.996 does not read as 35.
        exact_count = int(plan.budget.exact_count * 100) / 100
    return ConversionReport(
        model=plan.model,
        input_size=plan.input_size,
        params=ParamsChange(
            before=plan.params,
            after=params_untouched + sum(layer.params_after for layer in layers),
            weights=sum(layer.weight_params for layer in layers),
            positions=sum(layer.position_params for layer in layers),
        ),
        macs=macs_of_model(plan),
        budget=BudgetReport(
            scope=plan.scope,
            kernel_count=plan.budget.kernel_count,
            limit=plan.budget.limit,
            used=plan.budget.used,
            exact_count=exact_count,
        ),
        layers=layers,
        skipped=plan.skipped,
        stages_from=plan.stages_from,
        params_untouched=params_untouched,
        macs_untouched=macs_untouched,
        outcome=outcome,
        folded=plan.folded,
        layers_beyond_map=sum(layer.exceeds_map for layer in layers),
        not_measured=plan.not_measured,
        overruled=plan.overruled,
        notes=plan.notes,
        plan=plan,
    )


def report_view(
    report: ConversionReport,
    *,
    verbose: int = 0,
    cheaper_sizes: str = "dcls_convert.sweep(model), before converting",
    why_kept: str = "skipped says why",
) -> RenderableType:
    """Return a report as it is shown in a terminal of at least 80 columns.

    Args:
        report: The report to show.
        verbose: 0 shows a row for each stage. 1 shows a row for each layer, and the reasons why
            other convolutions are kept. 2 also names each kept convolution.
        cheaper_sizes: The command or call that shows the costs of other sizes.
        why_kept: Says where to read why convolutions are kept; follows "3 convolutions kept; ".
    """
    parts = [*_heading(report), *_cost_warning(report, cheaper_sizes)]
    parts += [Text(printable(warning), style="yellow") for warning in _warnings(report)]
    parts.append(Text())
    sentences = _sentences(report, verbose=verbose > 0)
    if verbose == 0:
        parts += [cost_table(report.layers, by_stage=True), Text()]
        if report.skipped:
            kept = count_text(len(report.skipped), "convolution")
            sentences.append(f"{kept} kept; {why_kept}.")
        parts += map(indented, sentences)
        return Group(*parts)
    parts.append(cost_table(report.layers, by_stage=False))
    if any(map(has_shared_positions, report.layers)):
        footnote = "* includes the positions, which the other layers of its tie group share"
        parts.append(Text(footnote, style="dim italic"))
    parts += [Text(), _model_table(report), Text()]
    parts += map(indented, sentences)
    parts += _kept_lines(report, by_name=verbose > 1)
    return Group(*parts)


def _heading(report: ConversionReport) -> list[RenderableType]:
    """Return lines on the costs of the conversion and on what was converted."""
    costs = f"{before_after(report.params)} parameters ({percent(report.params)})"
    if report.macs.delta is not None:
        costs += f", {short_before_after(report.macs)} MACs ({percent(report.macs, 1)})"
    counts = counts_text((layer.kernel_count for layer in report.layers), "element")
    kernels = f"{counts} in {windows_text(report.layers)}"
    if report.plan.growth_of_mixed_kernels is not None:
        kernels += f" (+{report.plan.growth_of_mixed_kernels})"
    model = f": {report.model or 'model'}"
    if report.folded:
        model += ", folded"
    if report.input_size is not None:
        model += f", input {size_text(report.input_size)}"
    elif report.plan.inputs is not None:
        model += f", input {inputs_text(report.plan.inputs)}"
    return [
        Text(costs, style=_style_of_costs(report)),
        Text(kernels) + Text(printable(model), style="dim"),
    ]


def _cost_warning(report: ConversionReport, cheaper_sizes: str) -> list[Text]:
    """Return a warning if windows are costly, with the command that shows others."""
    added_macs = report.macs.percent or 0.0  # percent; 0 if unknown
    grow_least = all(max(layer.growths) <= MIN_GROWTH for layer in report.layers)
    if added_macs > MAX_ADDED_COST_PERCENT and grow_least:
        growth = f"Even the smallest growth adds {added_macs:.0f} % to the MACs"
        return [Text(f"{growth}; rules can skip layers", style="yellow")]
    if added_macs <= COSTLY_MACS_PERCENT:
        return []
    factor = f"{1 + added_macs / 100:.1f} times the MACs"
    command = f"    {printable(cheaper_sizes)}"
    return [
        Text(f"{factor}. Cheaper sizes are shown by", style="yellow"),
        # Do not wrap the command, so that it can be copied.
        Text(command, style="yellow", no_wrap=True, overflow="ignore"),
    ]


def _warnings(report: ConversionReport) -> list[str]:
    """Warn of windows beyond their maps, lost weights, missing measurements and overruled ones."""
    warnings = []
    layer_count = len(report.layers)
    if 2 * report.layers_beyond_map > layer_count:
        all_or_most = "All" if report.layers_beyond_map == layer_count else "Most"
        too_large = f"{all_or_most} windows are too large for their maps"
        if layer_count == 1:
            too_large = "The window is too large for its map"
        warnings.append(f"{too_large}; rules can skip layers")
    losing_layers = sum(_only_loses_weights(layer) for layer in report.layers)
    if losing_layers and not report.folded:
        layers = f"{losing_layers} of {count_text(layer_count, 'layer')}"
        loss = f"{layers} get fewer weights but no larger window"
        warnings.append(f"{loss}; a rule can leave them out")
    if report.not_measured is not None:
        warnings.append(
            "It was not measured whether the network allows its convolutions to be replaced "
            f"({report.not_measured})"
        )
    for overruled in report.overruled:
        warnings.append(f"By a rule, windows grow where outputs did not look: {overruled}")
    return warnings


def _style_of_costs(report: ConversionReport) -> str:
    """Return a rich style; the colours only repeat what the numbers and words say."""
    added_macs = report.macs.percent or 0.0  # percent; 0 if unknown
    added_params = report.params.delta or 0
    if report.budget.slack < 0 or added_macs > COSTLY_MACS_PERCENT:
        return "bold red"
    if added_params > 0 or added_macs > MAX_ADDED_COST_PERCENT:
        return "bold yellow"
    if added_params < 0:
        return "bold green"
    return "bold"


def _only_loses_weights(layer: LayerPlan) -> bool:
    """True if the window has as many cells as the old kernel, but fewer elements."""
    cells = math.prod(layer.kernel_size)
    return math.prod(layer.dilated_size) == cells and layer.kernel_count < cells


def _kept_lines(report: ConversionReport, *, by_name: bool) -> list[RenderableType]:
    """List the kept convolutions and the reasons, by name or counted by class and reason."""
    if not report.skipped:
        return []
    kept = count_text(len(report.skipped), "convolution")
    parts = [Text(), Text(f" Kept as they are ({kept}):")]
    lines = []
    if by_name:
        for skip in report.skipped:
            lines.append(f"{shortened(skip.name)} ({skip.type}): {skip.reason}")
    else:
        counts = Counter((skip.type, skip.reason) for skip in report.skipped)
        for (class_name, reason), count in counts.most_common():
            lines.append(f"{count} x {class_name}: {reason}")
    return [*parts, *(indented(line, "dim", by=3) for line in lines)]


def report_markdown(report: ConversionReport) -> str:
    """Return the report in Markdown, for a model card."""
    stages = cost_table(report.layers, by_stage=True).markdown()
    items = ""
    for sentence in _sentences(report, verbose=True):
        items += f"- {printable(sentence)}\n"
    return f"{stages}\n{_model_table(report).markdown()}\n{items}"


def _model_table(report: ConversionReport) -> Table:
    return model_table(
        report.params, report.macs, params_of(report.layers), report.params_untouched
    )


def _sentences(report: ConversionReport, *, verbose: bool) -> list[str]:
    sentences = report_sentences(report.plan, report.params, report.macs, verbose=verbose)
    return sentences + outcome_sentences(report.outcome)
