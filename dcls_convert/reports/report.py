"""The report of a conversion, as data, and as text for the terminal and the model card."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, computed_field
from rich.console import Group, RenderableType
from rich.text import Text

from ..geometry import size_text
from ..layers.interpolation import find_interpolation
from ..networks.input_tensors import inputs_text
from ..networks.sites import Skipped
from ..options import ERROR_SCOPE, MAX_ADDED_COST_PERCENT, MIN_GROWTH
from ..planning.plan import ConversionPlan
from ..records import Record
from ..tables import Table, as_html, as_text, indented
from ..text import count_text, counts_text, printable, shortened
from .cost_tables import LayerTotals, ModelCost, layer_table, model_table, stage_table
from .costs import BudgetReport, LayerReport, MacsChange, Outcome, ParamsChange
from .number_text import before_after, percent, short_before_after
from .outcome import SMALL_ERROR, outcome_sentences

COSTLY_MACS_PERCENT = 50.0  # added MACs, in percent; beyond it the headline is red
LAYERS_NAMED = 5  # number of layers with the largest errors that a verbose report names
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, "
    "saves the construction, and stores window-sized kernels."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport(Record):
    """The changes of a conversion: parameters, MACs, budget and layers.

    The parameters of the layers and `params_untouched` sum to `params`; MACs sum likewise.
    """

    format: int = 1
    model: str | None
    input_size: tuple[int, ...] | None  # (channels, *spatial) of one image
    output: str | None  # the checkpoint folder; None if nothing was written
    params: ParamsChange
    macs: MacsChange
    budget: BudgetReport
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...]
    stages_from: str
    params_untouched: int
    macs_untouched: int | None
    # None, and absent from the JSON, if the network was not trained or the plan not carried out.
    outcome: Outcome | None = None
    # The plan that was carried out; not in the JSON.
    plan: Annotated[ConversionPlan, Field(exclude=True)] = field(repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def folded(self) -> bool:
        """True if plain convolutions have replaced the layers."""
        return self.plan.folded

    @computed_field  # type: ignore[prop-decorator]
    @property
    def layers_beyond_map(self) -> int:
        """Number of layers whose windows have cells that never meet the map, at the input size."""
        return sum(layer.exceeds_map for layer in self.plan.layers)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def not_measured(self) -> str | None:
        """Why it was not measured what the network does with its convolutions; or None."""
        return self.plan.not_measured

    def with_errors(
        self,
        kernel_errors: Mapping[str, float],
        output_errors: Mapping[str, float],
        outcome: Outcome | None = None,
        *,
        reasons: Mapping[str, tuple[str, ...]],
    ) -> "ConversionReport":
        """Return the report with the errors and reasons of `apply_plan_`, each by layer name."""
        layers = []
        for layer in self.layers:
            layers.append(
                replace(
                    layer,
                    fit_error=kernel_errors.get(layer.name),
                    output_error=output_errors.get(layer.name),
                    error_reasons=reasons.get(layer.name, ()),
                )
            )
        return replace(self, layers=tuple(layers), outcome=outcome)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = Record.to_dict(self)  # not `super()`, which finds no class with slots
        for name in ("outcome", "not_measured"):
            if data[name] is None:
                del data[name]
        for layer in data["layers"]:
            if not layer["error_reasons"]:
                del layer["error_reasons"]
        return data

    def __rich__(self) -> RenderableType:
        return report_view(self)

    __str__ = as_text
    _repr_html_ = as_html


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
        why_kept: Where to read why convolutions are kept; follows "3 convolutions kept; ".
    """
    parts = [*_heading(report), *_warnings(report, cheaper_sizes), Text()]
    if verbose == 0:
        parts += [stage_table(report.layers), Text(), indented(_budget_sentence(report))]
        if report.macs.note:
            parts.append(indented(_macs_sentence(report)))
        parts += map(indented, _error_sentences(report))
        parts += map(indented, outcome_sentences(report.outcome))
        if report.skipped:
            parts.append(indented(f"{_skipped_count(report)} kept; {why_kept}."))
    else:
        parts += _details(report)
        parts += _kept_lines(report, by_name=verbose > 1)
    return Group(*parts)


def _heading(report: ConversionReport) -> list[RenderableType]:
    """Return lines on the costs of the conversion and on what was converted."""
    totals = LayerTotals(layers=report.layers)
    counts = counts_text((layer.kernel_count for layer in report.layers), "element")
    kernels = f"{counts} in {totals.windows}"
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
        Text(_headline(report), style=_headline_style(report)),
        Text(kernels) + Text(printable(model), style="dim"),
    ]


def _warnings(report: ConversionReport, cheaper_sizes: str) -> list[Text]:
    """Return warnings: costly windows, layers that only lose weights, what was not measured."""
    warnings = []
    added_macs = report.macs.percent or 0.0  # percent; 0 if unknown
    if added_macs > MAX_ADDED_COST_PERCENT and _has_smallest_growth(report):
        growth = f"Even the smallest growth adds {added_macs:.0f} % to the MACs"
        warnings.append(Text(f"{growth}; rules can skip layers"))
    elif added_macs > COSTLY_MACS_PERCENT:
        factor = 1 + added_macs / 100
        warnings.append(Text(f"{factor:.1f} times the MACs. Cheaper sizes are shown by"))
        # Never wrapped, so that it can be copied.
        command = f"    {printable(cheaper_sizes)}"
        warnings.append(Text(command, no_wrap=True, overflow="ignore"))
    losing_layers = sum(_only_loses_weights(layer) for layer in report.layers)
    if losing_layers:
        layers = f"{count_text(losing_layers, 'layer')} of {len(report.layers)}"
        loss = f"Fewer weights and no larger window for {layers}"
        warnings.append(Text(f"{loss}; skip them with a rule"))
    if report.not_measured is not None:
        sentence = (
            f"Not measured: what the network does with its convolutions ({report.not_measured})"
        )
        warnings.append(Text(printable(sentence)))
    for warning in warnings:
        warning.stylize("yellow")
    return warnings


def _headline(report: ConversionReport) -> str:
    """Return the parameters and MACs before and after, with the changes in percent."""
    headline = f"{before_after(report.params)} parameters ({percent(report.params)})"
    if report.macs.delta is not None:
        headline += f", {short_before_after(report.macs)} MACs ({percent(report.macs, 1)})"
    return headline


def _headline_style(report: ConversionReport) -> str:
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


def _has_smallest_growth(report: ConversionReport) -> bool:
    """True if no window is more than MIN_GROWTH cells larger than its kernel along any axis."""
    for layer in report.plan.layers:
        if max(layer.growths) > MIN_GROWTH:
            return False
    return True


def _only_loses_weights(layer: LayerReport) -> bool:
    """True if the window has as many cells as the old kernel, but fewer elements."""
    cells = math.prod(layer.kernel_size)
    return math.prod(layer.dilated_size) == cells and layer.kernel_count < cells


def _details(report: ConversionReport) -> list[RenderableType]:
    """Return the layer table, the model table and the sentences of a verbose report."""
    parts: list[RenderableType] = [layer_table(report.layers)]
    if any(layer.tie_group for layer in report.layers):
        footnote = "* with the positions that the next layers of its tie group share"
        parts.append(Text(footnote, style="dim italic"))
    parts += _largest_error_lines(report)
    parts += [Text(), _model_table(report), Text()]
    parts += map(indented, _sentences(report))
    return parts


def _model_table(report: ConversionReport) -> Table[ModelCost]:
    return model_table(report.params, report.macs, report.layers, report.params_untouched)


def _largest_error_lines(report: ConversionReport) -> list[RenderableType]:
    """Return lines on the layers with the largest errors, with the reasons if they are known.

    They are the errors of the table's Error column. Small errors are left out.
    """
    has_output_errors = any(layer.output_error is not None for layer in report.layers)
    errors: list[tuple[float, LayerReport]] = []
    for layer in report.layers:
        error = layer.fit_error
        if has_output_errors:
            error = layer.output_error
        if error is not None and error >= SMALL_ERROR:
            errors.append((error, layer))
    if not errors:
        return []
    errors.sort(key=lambda pair: pair[0], reverse=True)
    compared = "outputs" if has_output_errors else "kernels"
    lines: list[RenderableType] = [Text(), Text(f" Largest errors of the {compared}:")]
    for error, layer in errors[:LAYERS_NAMED]:
        parts = [f"{shortened(layer.name)}: {error:.3f}", *layer.error_reasons]
        lines.append(indented("; ".join(parts), "dim", by=3))
    return lines


def _kept_lines(report: ConversionReport, *, by_name: bool) -> list[RenderableType]:
    """List the kept convolutions and the reasons, by name or counted by class and reason."""
    if not report.skipped:
        return []
    parts = [Text(), Text(f" Kept as they are ({_skipped_count(report)}):")]
    lines = []
    if by_name:
        for skip in report.skipped:
            lines.append(f"{shortened(skip.name)} ({skip.type}): {skip.reason}")
    else:
        counts = Counter((skip.type, skip.reason) for skip in report.skipped)
        for (class_name, reason), count in counts.most_common():
            lines.append(f"{count} x {class_name}: {reason}")
    return [*parts, *(indented(line, "dim", by=3) for line in lines)]


def _skipped_count(report: ConversionReport) -> str:
    return count_text(len(report.skipped), "convolution")


def report_markdown(report: ConversionReport) -> str:
    """Return the report in Markdown, for a model card."""
    items = "".join(f"- {line}\n" for line in _sentences(report))
    return "\n".join(
        [stage_table(report.layers).markdown(), _model_table(report).markdown(), items]
    )


def _budget_sentence(report: ConversionReport) -> str:
    """Say how much of the budget is used."""
    budget = report.budget
    text = "Budget"
    if budget.scope == ERROR_SCOPE:
        text += " (counts by error, the default with images)"
    if report.folded:
        text += " before folding"
    text += ": "
    if budget.exact_count is not None:
        text += f"{count_text(budget.kernel_count or 0, 'element')} per kernel use "
    text += f"{budget.used:,} of {budget.limit:,} parameters (no biases)"
    if budget.slack < 0:
        text += f", OVER BUDGET by {-budget.slack:,}"
    return f"{text}."


def _sentences(report: ConversionReport) -> list[str]:
    """Return sentences on the budget, errors, new kernels, MACs, feature maps and outputs."""
    kernels = f"{_kernels_sentence(report)}; stages from {report.stages_from}."
    lines = [_budget_sentence(report), *_error_sentences(report), kernels, _macs_sentence(report)]
    lines += _map_sentences(report)
    lines += outcome_sentences(report.outcome)
    return [printable(line) for line in lines]


def _error_sentences(report: ConversionReport) -> list[str]:
    """Explain the Error column if it holds output errors, as it does after a calibration."""
    if LayerTotals(layers=report.layers).output_error is None:
        return []
    return ["Error: relative error of each layer's outputs on the images it was fitted to."]


def _map_sentences(report: ConversionReport) -> list[str]:
    """Say in how many layers the window has cells that never meet the feature map, if in any."""
    if not report.layers_beyond_map:
        return []
    return [
        f"In {report.layers_beyond_map} of {count_text(len(report.layers), 'layer')}, "
        "the window is at least twice as large as the feature map at this input size; "
        "its outer cells meet only padding."
    ]


def _kernels_sentence(report: ConversionReport) -> str:
    weights = f"{report.params.weights:,} weights"
    if report.folded:
        return f"Folded into plain convolutions: {weights}, one for every cell of the windows"
    coordinates = "positions"
    if any(find_interpolation(layer.interpolation).has_sigma for layer in report.layers):
        coordinates = "positions and sigmas"
    return f"New kernels: {weights} and {report.params.positions:,} {coordinates}"


def _macs_sentence(report: ConversionReport) -> str:
    if report.macs.note:
        return f"MACs were not counted: {report.macs.note}."
    if report.macs.delta == 0:
        return "MACs stay the same: no window has more cells than the kernel that it replaces."
    reason = "although parameters do not"
    if (report.params.delta or 0) > 0:
        reason = "with the window"
    sentence = f"MACs rise {reason}: every window cell is multiplied, empty or not."
    if report.folded:
        return sentence
    return f"{sentence} {FOLDING_SENTENCE}"
