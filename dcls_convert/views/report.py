"""Conversion reports for the terminal and the model card."""

import math
from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from ..geometry import size_text
from ..layers.interpolation import find_interpolation
from ..options import MAX_ADDED_MACS_PERCENT, MIN_GROWTH
from ..planning.plan import ConversionPlan
from ..reports.predict import predict_report
from ..reports.report import ConversionReport, LayerReport
from ..tables import Column, indented
from ..text import counted, printable, shown
from .advice import OF_A_PLAN, ON_COMMAND_LINE, Advice
from .cost_tables import (
    STAGE_COLUMNS,
    LayerTotals,
    costs_table,
    model_table,
    stage_table,
)
from .number_text import before_after, percent, short_before_after
from .outcome import SMALL_ERROR, outcome_sentences

COSTLY = 50.0  # percent more MACs
COUNTS_OF_SCOPE = {
    "stage": "a count for each stage",
    "layer": "a count for each layer",
    "error": "counts by error, the default with images",
}
LAYERS_NAMED = 5  # layers with the largest errors that a verbose report names
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, "
    "saves the construction, and stores window-sized kernels."
)


def plan_view(plan: ConversionPlan) -> RenderableType:
    """The report that a plan predicts, in Python."""
    return report_view(predict_report(plan), advice=OF_A_PLAN)


def report_view(
    report: ConversionReport, *, verbose: int = 0, advice: Advice = ON_COMMAND_LINE
) -> RenderableType:
    """A report for a terminal of 80 columns or more.

    Args:
        report: The report to show.
        verbose: 0: a row for each stage. 1: a row for each layer, and why other convolutions
            are kept. 2: the name of each kept convolution, too.
        advice: What the report tells its reader to do: ON_COMMAND_LINE, IN_PYTHON or OF_A_PLAN.
    """
    parts = [*_heading(report, advice), Text()]
    if verbose == 0:
        parts += [stage_table(report), Text(), indented(_budget_sentence(report))]
        if report.macs.note:
            parts.append(indented(_macs_sentence(report)))
        parts += map(indented, _error_sentences(report))
        parts += map(indented, outcome_sentences(report, advice))
        if report.skipped:
            parts.append(indented(f"{_skipped_count(report)} kept; {advice.why_kept}."))
    else:
        parts += _details(report, advice)
        parts += _kept_lines(report, by_name=verbose > 1)
    return Group(*parts)


def _heading(report: ConversionReport, advice: Advice) -> list[RenderableType]:
    """What the conversion costs, what was converted, and warnings."""
    totals = LayerTotals(layers=report.layers)
    kernels = f"{totals.counts} elements in {totals.windows}"
    if report.plan.growth_of_mixed_kernels is not None:
        kernels += f" (+{report.plan.growth_of_mixed_kernels})"
    model = f": {report.model or 'model'}"
    if report.folded:
        model += ", folded"
    if report.input_size:
        model += f", input {size_text(report.input_size)}"
    parts: list[RenderableType] = [
        Text(_headline(report), style=_headline_style(report)),
        Text(kernels) + Text(printable(model), style="dim"),
    ]
    more_macs = report.macs.percent or 0.0  # 0 if they are not known
    if more_macs > MAX_ADDED_MACS_PERCENT and _grows_by_the_least(report):
        warning = f"Even the smallest growth adds {more_macs:.0f} % to the MACs"
        parts.append(Text(f"{warning}; rules can skip layers", style="yellow"))
    elif more_macs > COSTLY:
        times = f"{1 + more_macs / 100:.1f} times the MACs"
        sizes = printable(advice.cheaper_sizes)
        parts.append(Text(f"{times}; {sizes}", style="yellow"))
    fewer_weights = sum(_only_loses_weights(layer) for layer in report.layers)
    if fewer_weights:
        of_layers = f"{counted(fewer_weights, 'layer')} of {len(report.layers)}"
        warning = f"Fewer weights and no larger window for {of_layers}; skip them with a rule"
        parts.append(Text(warning, style="yellow"))
    return parts


def _headline(report: ConversionReport) -> str:
    """Parameters and MACs before and after."""
    headline = f"{before_after(report.params)} parameters ({percent(report.params)})"
    if report.macs.delta is not None:
        headline += f", {short_before_after(report.macs)} MACs ({percent(report.macs, 1)})"
    return headline


def _headline_style(report: ConversionReport) -> str:
    """rich's style; the colours repeat what the numbers and words say."""
    more_macs = report.macs.percent or 0.0  # 0 if they are not known
    more_params = report.params.delta or 0
    if report.budget.slack < 0 or more_macs > COSTLY:
        return "bold red"
    if more_params > 0 or more_macs > MAX_ADDED_MACS_PERCENT:
        return "bold yellow"
    if more_params < 0:
        return "bold green"
    return "bold"


def _grows_by_the_least(report: ConversionReport) -> bool:
    """Whether every window is at most MIN_GROWTH cells larger than its kernel, on each axis."""
    for layer in report.plan.layers:
        if max(layer.growths) > MIN_GROWTH:
            return False
    return True


def _only_loses_weights(layer: LayerReport) -> bool:
    """Whether the window is as large as the old kernel, with fewer elements than cells."""
    cells = math.prod(layer.kernel_size)
    return math.prod(layer.dilated_size) == cells and layer.kernel_count < cells


def _details(report: ConversionReport, advice: Advice) -> list[RenderableType]:
    """A row for each layer, the whole model, and sentences."""
    rows = [LayerTotals(name=layer.name, layers=(layer,)) for layer in report.layers]
    name: Column[LayerTotals] = Column("Layer", lambda row: row.name)
    columns = [name, *STAGE_COLUMNS[2:]]
    parts: list[RenderableType] = [costs_table(columns, rows, _layer_params)]
    if any(layer.tie_group for layer in report.layers):
        footnote = "* with the positions that the next layers of its tie group share"
        parts.append(Text(footnote, style="dim italic"))
    parts += _largest_error_lines(report)
    parts += [Text(), model_table(report), Text()]
    parts += map(indented, _sentences(report, advice))
    return parts


def _largest_error_lines(report: ConversionReport) -> list[RenderableType]:
    """The layers that lost most, and why, as far as that is known; nothing if none lost much.

    The errors are those of the table's column.
    """
    has_output_errors = any(layer.output_error is not None for layer in report.layers)
    errors: list[tuple[float, LayerReport]] = []
    for layer in report.layers:
        error = layer.output_error if has_output_errors else layer.fit_error
        if error is not None and error >= SMALL_ERROR:
            errors.append((error, layer))
    if not errors:
        return []
    errors.sort(key=lambda pair: pair[0], reverse=True)
    what = "outputs" if has_output_errors else "kernels"
    lines: list[RenderableType] = [Text(), Text(f" Largest errors of the {what}:")]
    for error, layer in errors[:LAYERS_NAMED]:
        parts = [f"{shown(layer.name)}: {error:.3f}", *layer.error_reasons]
        lines.append(indented("; ".join(parts), "dim", by=3))
    return lines


def _layer_params(row: LayerTotals) -> str:
    """A layer's parameters, with a star where they include positions of its tie group."""
    (layer,) = row.layers
    params = before_after(row.params)
    if layer.tie_group is not None and layer.position_params > 0:
        return f"{params}*"
    return f"{params} "


def _kept_lines(report: ConversionReport, *, by_name: bool) -> list[RenderableType]:
    """The convolutions that are kept and why: by name, or counted by class and reason."""
    if not report.skipped:
        return []
    parts = [Text(), Text(f" Kept as they are ({_skipped_count(report)}):")]
    lines = []
    if by_name:
        for skip in report.skipped:
            lines.append(f"{shown(skip.name)} ({skip.type}): {skip.reason}")
    else:
        kinds = Counter((skip.type, skip.reason) for skip in report.skipped)
        for (kind, reason), count in kinds.most_common():
            lines.append(f"{count} x {kind}: {reason}")
    return [*parts, *(indented(line, "dim", by=3) for line in lines)]


def _skipped_count(report: ConversionReport) -> str:
    return counted(len(report.skipped), "convolution")


def report_markdown(report: ConversionReport) -> str:
    """The report for a model card."""
    items = "".join(f"- {line}\n" for line in _sentences(report, ON_COMMAND_LINE))
    return "\n".join([stage_table(report).markdown(), model_table(report).markdown(), items])


def _budget_sentence(report: ConversionReport) -> str:
    """How much of the budget is used, in a sentence."""
    budget = report.budget
    text = "Budget"
    if budget.scope in COUNTS_OF_SCOPE:
        text += f" ({COUNTS_OF_SCOPE[budget.scope]})"
    if report.folded:
        text += " before folding"
    text += ": "
    if budget.exact_count is not None:
        text += f"{counted(budget.units[0].kernel_count or 0, 'element')} per kernel use "
    text += f"{budget.used:,} of {budget.limit:,} parameters (no biases)"
    if budget.slack < 0:
        text += f", OVER BUDGET by {-budget.slack:,}"
    return f"{text}."


def _sentences(report: ConversionReport, advice: Advice) -> list[str]:
    """The budget, the new kernels, the MACs, and what became of a trained network's outputs."""
    kernels = f"{_kernels_sentence(report)}; stages from {report.stages_from}."
    lines = [_budget_sentence(report), *_error_sentences(report), kernels, _macs_sentence(report)]
    lines += _map_sentences(report)
    lines += outcome_sentences(report, advice)
    return [printable(line) for line in lines]


def _error_sentences(report: ConversionReport) -> list[str]:
    """What the table's errors are of, after a calibration; without one they are of kernels."""
    if LayerTotals(layers=report.layers).output_error is None:
        return []
    return ["Error: what each layer's outputs lost, on the images that it was fitted to."]


def _map_sentences(report: ConversionReport) -> list[str]:
    """In how many layers the window has cells that never meet the map; nothing if in none."""
    if not report.layers_beyond_map:
        return []
    return [
        f"In {report.layers_beyond_map} of {counted(len(report.layers), 'layer')}, the window is "
        "at least twice as large as the feature map at this input size; "
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
