"""The report of a conversion, as data, and as text for the terminal and the model card."""

import functools
import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import check_argument
from ..geometry import size_text
from ..layers.interpolation import find_interpolation
from ..networks.sites import Skipped
from ..options import DEFAULT_INTERPOLATION, ERROR_SCOPE, MAX_ADDED_COST_PERCENT, MIN_GROWTH
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..records import as_json, write_json
from ..running.input_spec import inputs_text
from ..tables import Table, as_html, as_text, indented
from ..text import count_text, counts_text, printable, range_text, short_list, shortened
from .cost_tables import layer_table, model_table, shown_error, stage_table, windows_text
from .costs import (
    BudgetReport,
    Change,
    MacsChange,
    ParamsChange,
    before_after,
    macs_of,
    macs_of_model,
    params_of,
    percent,
    short_before_after,
)
from .outcome import SMALL_ERROR, Outcome, outcome_sentences

COSTLY_MACS_PERCENT = 50.0  # added MACs, in percent; beyond it the first line is red
STAGES_NAMED = 4  # number of stages with tie groups that are named
LAYERS_NAMED = 5  # number of layers with the largest errors that a verbose report names
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, "
    "saves the construction, and stores window-sized kernels."
)
# Attributes of a layer that the JSON has.
LAYER_KEYS = (
    *("name", "stage", "kind", "kernel_size", "dilated_size", "kernel_count", "interpolation"),
    *("tie_group", "params_before", "params_after", "weight_params", "position_params"),
    *("macs_before", "macs_after", "fit_error", "output_error"),
)


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What a plan changes, and what came of it: the plan's layers and totals.

    The parameters of the layers and `params_untouched` sum to `params`; MACs sum likewise.
    """

    plan: ConversionPlan  # its layers have errors, once they have values
    output: str | None = None  # the folder; None if nothing was written
    outcome: Outcome | None = None  # None for an untrained network, or before a conversion

    format = 1  # of the JSON

    @property
    def model(self) -> str | None:
        """See `ConversionPlan`."""
        return self.plan.model

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """(channels, *spatial) of one image."""
        return self.plan.input_size

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The converted convolutions."""
        return self.plan.layers

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The convolutions that stay as they are, and why."""
        return self.plan.skipped

    @property
    def stages_from(self) -> str:
        """How the stages were found."""
        return self.plan.stages_from

    @property
    def folded(self) -> bool:
        """True if plain convolutions have replaced the layers."""
        return self.plan.folded

    @property
    def overruled(self) -> tuple[str, ...]:
        """Windows that grow as rules say, although outputs then depend on what they must not."""
        return self.plan.overruled

    @property
    def not_measured(self) -> str | None:
        """Why it was not measured what the network does with its convolutions; None if it was."""
        return self.plan.not_measured

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know of the new layers."""
        return self.plan.notes

    @functools.cached_property
    def replaced_params(self) -> Change:
        """Parameters of the convolutions, and of the layers that replace them."""
        return params_of(self.layers)

    @functools.cached_property
    def params(self) -> ParamsChange:
        """Parameters of the whole model."""
        weights = 0
        positions = 0
        for layer in self.layers:
            weights += layer.weight_params
            positions += layer.position_params
        delta = self.replaced_params.delta or 0
        before = self.plan.params
        return ParamsChange(
            before=before, after=before + delta, weights=weights, positions=positions
        )

    @property
    def params_untouched(self) -> int:
        """Parameters outside of the layers."""
        return self.plan.params - (self.replaced_params.before or 0)

    @functools.cached_property
    def macs(self) -> MacsChange:
        """MACs of the whole model for one input."""
        return macs_of_model(self.plan)

    @property
    def macs_untouched(self) -> int | None:
        """MACs outside of the layers; None if not known."""
        if self.plan.macs is None:
            return None
        return self.plan.macs - (macs_of(self.layers).before or 0)

    @property
    def budget(self) -> BudgetReport:
        """How the kernel counts were chosen; of a folded model, before folding."""
        budget = self.plan.budget
        exact_count = None
        if budget.exact_count is not None:
            # Rounded down, so that 34.996 is not shown as 35.
            exact_count = int(budget.exact_count * 100) / 100
        return BudgetReport(
            scope=self.plan.scope,
            kernel_count=budget.kernel_count,
            limit=budget.limit,
            used=budget.used,
            exact_count=exact_count,
        )

    @functools.cached_property
    def layers_beyond_map(self) -> int:
        """Number of layers whose windows have cells that never meet the map, at the input size."""
        return sum(layer.exceeds_map for layer in self.plan.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plan = self.plan
        data: dict[str, Any] = {
            "format": self.format,
            "model": plan.model,
            "input_size": plan.input_size and list(plan.input_size),
            "output": self.output,
            "params": as_json(self.params),
            "macs": as_json(self.macs),
            "budget": as_json(self.budget),
            "layers": [_layer_row(layer) for layer in self.layers],
            "skipped": [as_json(skip) for skip in plan.skipped],
            "stages_from": plan.stages_from,
            "params_untouched": self.params_untouched,
            "macs_untouched": self.macs_untouched,
        }
        if self.outcome is not None:
            data["outcome"] = as_json(self.outcome)
        data |= {"folded": plan.folded, "layers_beyond_map": self.layers_beyond_map}
        if plan.not_measured is not None:
            data["not_measured"] = plan.not_measured
        if plan.overruled:
            data["overruled"] = list(plan.overruled)
        if plan.notes:
            data["notes"] = list(plan.notes)
        return data

    def to_json(self) -> str:
        """Return the JSON report; raise CheckpointError if a number is not finite."""
        return write_json(self.to_dict())

    def __rich__(self) -> RenderableType:
        return report_view(self)

    __str__ = as_text
    _repr_html_ = as_html


def _layer_row(layer: LayerPlan) -> dict[str, Any]:
    """Return what the JSON has of a layer."""
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
    return ConversionReport(plan=plan)


def report_view(
    report: ConversionReport,
    *,
    verbose: int = 0,
    with_outcome: bool = True,
    cheaper_sizes: str = "dcls_convert.sweep(model), before converting",
    why_kept: str = "skipped says why",
) -> RenderableType:
    """Return a report as it is shown in a terminal of at least 80 columns.

    Args:
        report: The report to show.
        verbose: 0 shows a row for each stage. 1 shows a row for each layer, and the reasons why
            other convolutions are kept. 2 also names each kept convolution.
        with_outcome: Whether to say how close outputs stayed.
        cheaper_sizes: The command or call that shows the costs of other sizes.
        why_kept: Where to read why convolutions are kept; follows "3 convolutions kept; ".
    """
    parts = [*_heading(report), *_warnings(report, cheaper_sizes), Text()]
    sentences = _sentences(report, verbose=verbose > 0)
    if with_outcome:
        sentences += outcome_sentences(report.outcome)
    if verbose == 0:
        parts += [stage_table(report.layers), Text()]
        if report.skipped:
            kept = count_text(len(report.skipped), "convolution")
            sentences.append(f"{kept} kept; {why_kept}.")
        parts += map(indented, sentences)
        return Group(*parts)
    parts.append(layer_table(report.layers))
    if any(layer.tie_group for layer in report.layers) and not report.plan.folded:
        footnote = "* includes the positions, which the other layers of its tie group share"
        parts.append(Text(footnote, style="dim italic"))
    parts += _largest_error_lines(report)
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
    if report.plan.folded:
        model += ", folded"
    if report.input_size is not None:
        model += f", input {size_text(report.input_size)}"
    elif report.plan.inputs is not None:
        model += f", input {inputs_text(report.plan.inputs)}"
    return [
        Text(costs, style=_style_of_costs(report)),
        Text(kernels) + Text(printable(model), style="dim"),
    ]


def _warnings(report: ConversionReport, cheaper_sizes: str) -> list[Text]:
    """Return warnings: costly windows, layers that only lose weights, what was not measured."""
    warnings = []
    added_macs = report.macs.percent or 0.0  # percent; 0 if unknown
    grow_least = all(max(layer.growths) <= MIN_GROWTH for layer in report.plan.layers)
    if added_macs > MAX_ADDED_COST_PERCENT and grow_least:
        growth = f"Even the smallest growth adds {added_macs:.0f} % to the MACs"
        warnings.append(Text(f"{growth}; rules can skip layers"))
    elif added_macs > COSTLY_MACS_PERCENT:
        factor = 1 + added_macs / 100
        warnings.append(Text(f"{factor:.1f} times the MACs. Cheaper sizes are shown by"))
        # Never wrapped, so that it can be copied.
        command = f"    {printable(cheaper_sizes)}"
        warnings.append(Text(command, no_wrap=True, overflow="ignore"))
    if 2 * report.layers_beyond_map > len(report.layers):
        all_or_most = "All" if report.layers_beyond_map == len(report.layers) else "Most"
        too_large = f"{all_or_most} windows are too large for their maps"
        if len(report.layers) == 1:
            too_large = "The window is too large for its map"
        warnings.append(Text(f"{too_large}; rules can skip layers"))
    losing_layers = sum(_only_loses_weights(layer) for layer in report.layers)
    if losing_layers and not report.plan.folded:
        layers = f"{losing_layers} of {count_text(len(report.layers), 'layer')}"
        loss = f"{layers} get fewer weights but no larger window"
        warnings.append(Text(f"{loss}; a rule can leave them out"))
    if report.not_measured is not None:
        sentence = (
            "It was not measured whether the network allows its convolutions to be replaced "
            f"({report.not_measured})"
        )
        warnings.append(Text(printable(sentence)))
    for overruled in report.plan.overruled:
        warnings.append(
            Text(printable(f"By a rule, windows grow where outputs did not look: {overruled}"))
        )
    for warning in warnings:
        warning.stylize("yellow")
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


def _largest_error_lines(report: ConversionReport) -> list[RenderableType]:
    """Return lines on the layers with the largest errors.

    They are the errors of the table's Error column. Small errors are left out.
    """
    error_of = operator.attrgetter(shown_error(report.layers))
    layers = [layer for layer in report.layers if (error_of(layer) or 0) >= SMALL_ERROR]
    if not layers:
        return []
    compared = "kernels"
    if shown_error(report.layers) == "output_error":
        compared = "outputs"
    lines: list[RenderableType] = [Text(), Text(f" Largest errors of the {compared}:")]
    for layer in sorted(layers, key=error_of, reverse=True)[:LAYERS_NAMED]:
        lines.append(indented(f"{shortened(layer.name)}: {error_of(layer):.3f}", "dim", by=3))
    return lines


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
    stages = stage_table(report.layers).markdown()
    model = _model_table(report).markdown()
    sentences = _sentences(report, verbose=True) + outcome_sentences(report.outcome)
    items = "".join(f"- {printable(line)}\n" for line in sentences)
    return f"{stages}\n{model}\n{items}"


def _model_table(report: ConversionReport) -> Table:
    return model_table(report.params, report.macs, report.replaced_params, report.params_untouched)


def _sentences(report: ConversionReport, *, verbose: bool) -> list[str]:
    """Return sentences on the budget, positions and errors.

    With `verbose`, also on the new kernels and MACs.
    """
    lines = [_budget_sentence(report)]
    if not report.plan.folded:
        lines.append(_positions_sentence(report))
    if any(layer.grow for layer in report.layers):
        lines.append(_sides_sentence(report))
    if report.macs.note:
        lines.append(report.macs.note_sentence)
    if shown_error(report.layers) == "output_error":
        lines.append(
            "Error: relative error of each layer's outputs on the images it was fitted to."
        )
    if verbose:
        lines.append(f"{_new_kernels(report)}; stages from {report.plan.stages_from}.")
        if report.macs.delta is not None:
            lines.append(_macs_sentence(report))
        if (maps := _maps_sentence(report)) is not None:
            lines.append(maps)
    if report.layers_beyond_map:
        lines.append(_beyond_map_sentence(report))
    return [*lines, *report.notes]


def _beyond_map_sentence(report: ConversionReport) -> str:
    """Say in how many layers the window is larger than the map allows, and the sizes of maps."""
    maps = []
    for layer in report.layers:
        if layer.exceeds_map and layer.input_extent is not None:
            maps.append(layer.input_extent)
    subject = f"In {len(maps)} of {count_text(len(report.layers), 'layer')}, outer cells meet"
    if len(maps) == len(report.layers):
        subject = "Outer cells meet"
    return f"{subject} only padding (maps of {range_text(maps, size_text)})."


def _maps_sentence(report: ConversionReport) -> str | None:
    """Say how large the layers' maps are, in the order of the layers; None if it is not known."""
    sizes: Counter[str] = Counter()
    for layer in report.layers:
        if layer.input_extent is not None:
            sizes[size_text(layer.input_extent)] += 1
    if not sizes:
        return None
    maps = [f"{size} ({count_text(count, 'layer')})" for size, count in sizes.items()]
    return f"Maps at this input size: {', '.join(maps)}."


def _budget_sentence(report: ConversionReport) -> str:
    """Say how much of the budget is used."""
    budget = report.budget
    text = "Budget"
    if report.plan.scope == ERROR_SCOPE:
        text += " (counts by error)"
    if report.plan.folded:
        text += " before folding"
    text += ": "
    if budget.kernel_count is not None:
        text += f"{count_text(budget.kernel_count, 'element')} per kernel use "
    text += f"{budget.used:,} of {budget.limit:,} parameters (no biases)"
    if budget.slack < 0:
        text += f", OVER BUDGET by {-budget.slack:,}"
    return f"{text}."


def _positions_sentence(report: ConversionReport) -> str:
    """Say how many positions are shared, in which stages; and the interpolation, if unusual."""
    tied = [layer for layer in report.layers if layer.tie_group is not None]
    names = sorted({layer.interpolation for layer in report.layers})
    interpolation = ""
    if names != [DEFAULT_INTERPOLATION]:
        interpolation = f"; {' and '.join(names)} interpolation"
    if not tied:
        return f"No layers share their positions{interpolation}."
    groups = {layer.tie_group for layer in tied}
    verb = "shares" if len(groups) == 1 else "share"
    shared = sum(layer.position_params for layer in tied)
    sentence = f"{count_text(len(groups), 'tie group')} {verb} {shared:,} {_coordinates(report)}"
    sentence += f" in {short_list(dict.fromkeys(layer.stage for layer in tied), STAGES_NAMED)}"
    if len(tied) < len(report.layers):
        own = len(report.layers) - len(tied)
        sentence += f" (not shared: {count_text(own, 'layer')})"
    return f"{sentence}{interpolation}."


def _sides_sentence(report: ConversionReport) -> str:
    """Say how many windows grow to one side, and what was measured of the network."""
    parts = []
    for side in ("back", "ahead"):
        count = sum(side in layer.grow for layer in report.layers)
        if count:
            verb = "grows" if count == 1 else "grow"
            parts.append(f"{count_text(count, 'layer')} {verb} {side} only")
    sentence = " and ".join(parts)
    if report.plan.outputs_look == "back":
        sentence += ": the network is causal"
    elif report.plan.outputs_look == "ahead":
        sentence += ": the network looks ahead only"
    return f"{sentence}."


def _new_kernels(report: ConversionReport) -> str:
    weights = f"{report.params.weights:,} weights"
    if report.plan.folded:
        return f"Folded into plain convolutions: {weights}, one for every cell of the windows"
    return f"New kernels: {weights} and {report.params.positions:,} {_coordinates(report)}"


def _coordinates(report: ConversionReport) -> str:
    if any(find_interpolation(layer.interpolation).has_sigma for layer in report.layers):
        return "positions and sigmas"
    return "positions"


def _macs_sentence(report: ConversionReport) -> str:
    if report.macs.delta == 0:
        return "MACs stay the same: no window has more cells than the kernel that it replaces."
    reason = "although parameters do not"
    if (report.params.delta or 0) > 0:
        reason = "with the window"
    sentence = f"MACs rise {reason}: every window cell is multiplied, empty or not."
    if report.plan.folded:
        return sentence
    return f"{sentence} {FOLDING_SENTENCE}"
