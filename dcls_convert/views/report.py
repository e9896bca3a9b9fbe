"""Conversion reports as tables for the terminal and the model card, and the next steps."""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.card import training_code, with_folder
from ..depthwise.geometry import size_text
from ..errors import printable, shown
from ..layers.interpolation import find_interpolation
from ..networks.model_outputs import Agreement
from ..options import EXACT, MAX_ADDED_MACS_PERCENT, MIN_GROWTH
from ..pipeline.conversion import Conversion
from ..pipeline.resolved import ResolvedRequest
from ..planning.plan import ConversionPlan
from ..reports.report import Change, ConversionReport, LayerReport, Outcome, predict_report
from ..tables import Column, Table, counted, indented, span
from .counts import arrow, exact, in_one_unit, percent, short_arrow

COSTLY = 50.0  # percent more MACs
COUNTS_OF_SCOPE = {
    "stage": "a count for each stage",
    "layer": "a count for each layer",
    "error": "counts by error, the default with images",
}
LAYERS_NAMED = 5  # layers with the largest errors that a verbose report names
SMALL_ERROR = 1e-3  # kernel error below which a user would call the outputs unchanged
FEW_IMAGES = 4  # to fit to; fewer are said to be few
MIN_IMAGES_FOR_PERCENT = 10  # images; of fewer, a share in percent says more than is known
NEAR_THE_CENTRE = (
    "Elements start near the centre, as in the paper, and need long training to move.",
    "For a short training, --positions kernel spreads them over the old kernel.",
)
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, "
    "saves the construction, and stores window-sized kernels."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What a report tells its reader to do."""

    cheaper_sizes: str
    why_kept: str
    calibrate: str


ON_COMMAND_LINE = Advice(
    cheaper_sizes="cheaper sizes: dcls-convert sweep",
    why_kept="-v says why",
    calibrate="--calibrate FOLDER, with some images,",
)
IN_PYTHON = Advice(
    cheaper_sizes="cheaper sizes: dcls_convert.sweep, before converting",
    why_kept="report.skipped says why",
    calibrate="calibration=images",
)
OF_A_PLAN = replace(IN_PYTHON, why_kept="plan.skipped says why")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTotals:
    """Sums over replaced layers: those of one stage, of the whole model, or a single one."""

    layers: tuple[LayerReport, ...]
    name: str = ""

    @property
    def kernels(self) -> str:
        """ "7x7 → 17x17"."""
        return f"{span(self._each('kernel_size'), size_text)} → {self.windows}"

    @property
    def windows(self) -> str:
        """ "17x17", or "9x9..17x17"."""
        return span(self._each("dilated_size"), size_text)

    @property
    def counts(self) -> str:
        """ "34", or "29..40"."""
        return span(self._each("kernel_count"))

    @property
    def params(self) -> Change:
        """With biases and positions; shared positions count in the first layer that uses them."""
        return _change_of_sums(self._each("params_before"), self._each("params_after"))

    @property
    def macs(self) -> Change:
        """For one image; unknown if the model could not be traced."""
        return _change_of_sums(self._each("macs_before"), self._each("macs_after"))

    @property
    def kernel_error(self) -> float | None:
        """The mean relative error of the kernels; None if no trained kernels were fitted."""
        return _mean_of_known(self._each("fit_error"))

    @property
    def output_error(self) -> float | None:
        """The mean relative error of the layers' outputs; None without a calibration."""
        return _mean_of_known(self._each("output_error"))

    def _each(self, field: str) -> list[Any]:
        """The field of each layer."""
        return [getattr(layer, field) for layer in self.layers]


def _mean_of_known(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return sum(known) / len(known)


def _change_of_sums(before: Sequence[int | None], after: Sequence[int | None]) -> Change:
    """The sums before and after; unknown if one of the numbers is."""
    sum_before = 0
    sum_after = 0
    for count_before, count_after in zip(before, after, strict=True):
        if count_before is None or count_after is None:
            return Change()
        sum_before += count_before
        sum_after += count_after
    return Change(before=sum_before, after=sum_after)


def stage_rows(layers: Iterable[LayerReport]) -> list[LayerTotals]:
    """A row for each stage, in the layers' order."""
    stages: dict[str, list[LayerReport]] = {}
    for layer in layers:
        stages.setdefault(layer.stage or "(no stage)", []).append(layer)
    rows = []
    for name, members in stages.items():
        rows.append(LayerTotals(name=name, layers=tuple(members)))
    return rows


STAGE_COLUMNS: list[Column[LayerTotals]] = [
    Column("Stage", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column("Kernel", lambda row: row.kernels, left=True),
    Column("Count", lambda row: row.counts),
]


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
        advice: In words for the reader, such as ON_COMMAND_LINE or IN_PYTHON.
    """
    parts = [*_heading(report, advice), Text()]
    if verbose == 0:
        parts += [_stage_table(report), Text(), indented(_budget(report))]
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
    if report.plan.growth is not None:
        kernels += f" (+{report.plan.growth})"
    model = f": {report.model or 'model'}"
    if report.folded:
        model += ", folded"
    if report.input_size:
        model += f", input {size_text(report.input_size)}"
    parts: list[RenderableType] = [
        Text(_verdict(report), style=_verdict_style(report)),
        Text(kernels) + Text(printable(model), style="dim"),
    ]
    more_macs = report.macs.percent or 0.0  # 0 if they are not known
    if more_macs > MAX_ADDED_MACS_PERCENT and _grows_by_the_least(report):
        warning = f"Even the smallest larger windows cost {more_macs:.0f} % more MACs"
        parts.append(Text(f"{warning}; rules can skip layers", style="yellow"))
    elif more_macs > COSTLY:
        times = f"{1 + more_macs / 100:.1f} times the MACs"
        sizes = printable(advice.cheaper_sizes)
        parts.append(Text(f"{times}; {sizes}", style="yellow"))
    fewer_weights = sum(_only_loses_weights(layer) for layer in report.layers)
    if fewer_weights:
        of_layers = f"{counted(fewer_weights, 'layer')} of {len(report.layers)}"
        warning = f"No larger window, and fewer weights, for {of_layers}; skip them with a rule"
        parts.append(Text(warning, style="yellow"))
    return parts


def _verdict(report: ConversionReport) -> str:
    verdict = f"{arrow(report.params)} parameters ({percent(report.params)})"
    if report.macs.delta is not None:
        verdict += f", {short_arrow(report.macs)} MACs ({percent(report.macs, 1)})"
    return verdict


def _verdict_style(report: ConversionReport) -> str:
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
    parts: list[RenderableType] = [_costs_table(columns, rows, _layer_params)]
    if any(layer.tie_group for layer in report.layers):
        footnote = "* with the positions that the next layers of its tie group share"
        parts.append(Text(footnote, style="dim italic"))
    parts += _largest_error_lines(report)
    parts += [Text(), _model_table(report), Text()]
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
    params = arrow(row.params)
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
    return "\n".join([_stage_table(report).markdown(), _model_table(report).markdown(), items])


def _stage_table(report: ConversionReport) -> Table[LayerTotals]:
    return _costs_table(STAGE_COLUMNS, stage_rows(report.layers), lambda row: arrow(row.params))


def _costs_table(
    columns: Sequence[Column[LayerTotals]],
    rows: Sequence[LayerTotals],
    params: Callable[[LayerTotals], str],
) -> Table[LayerTotals]:
    """A table of these columns, and the costs: `params` writes a row's parameters."""
    macs = []
    for row in rows:
        macs += [row.macs.before, row.macs.after]
    write_macs, unit = in_one_unit(macs)
    costs: list[Column[LayerTotals]] = [
        Column("Parameters", params),
        Column(f"MACs{unit}", lambda row: arrow(row.macs, write_macs)),
        _error_column(rows),
    ]
    return Table([*columns, *costs], rows)


def _error_column(rows: Sequence[LayerTotals]) -> Column[LayerTotals]:
    """Of outputs after a calibration, which fits them and not the kernels; otherwise of kernels."""
    if any(row.output_error is not None for row in rows):
        return Column("Error", lambda row: row.output_error, "{:.3f}".format)
    return Column("Error", lambda row: row.kernel_error, "{:.3f}".format)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """A row of the table of the whole model."""

    name: str
    change: Change
    is_part: bool = False  # of the row above: indented, dim, and without a percentage


def _model_table(report: ConversionReport) -> Table[ModelCost]:
    replaced = LayerTotals(layers=report.layers).params
    untouched = Change(before=report.params_untouched, after=report.params_untouched)
    rows = [
        ModelCost(name="Parameters", change=report.params),
        ModelCost(name="  replaced layers", change=replaced, is_part=True),
        ModelCost(name="  everything else", change=untouched, is_part=True),
        ModelCost(name="MACs", change=report.macs),
    ]

    def change_in_percent(row: ModelCost) -> str | None:
        if row.is_part:
            return None
        return percent(row.change)

    def style(row: ModelCost) -> str:
        return "dim" if row.is_part else "bold"

    columns: list[Column[ModelCost]] = [
        Column("Whole model", lambda row: row.name),
        Column("Before", lambda row: exact(row.change.before)),
        Column("After", lambda row: exact(row.change.after)),
        Column("Change", lambda row: exact(row.change.delta, "+")),
        Column("", change_in_percent),
    ]
    return Table(columns, rows, style=style)


def _budget(report: ConversionReport) -> str:
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
    lines = [_budget(report), *_error_sentences(report), kernels, _macs_sentence(report)]
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
        "at least twice as large as the map at this input size; its outer cells meet only padding."
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
    reason = "although parameters do not"
    if (report.params.delta or 0) > 0:
        reason = "with the window"
    sentence = f"MACs rise {reason}: every window cell is multiplied, empty or not."
    if report.folded:
        return sentence
    return f"{sentence} {FOLDING_SENTENCE}"


def outcome_sentences(report: ConversionReport, advice: Advice = ON_COMMAND_LINE) -> list[str]:
    """How close a trained network's kernels and outputs stayed; empty if that is not known."""
    outcome = report.outcome
    if outcome is None or outcome.kernel_error is None:
        return []
    kernels = f"Mean relative error of the kernels: {outcome.kernel_error:.3f}."
    is_calibrated = outcome.fitted_images > 0 or outcome.images > 0
    if not is_calibrated and outcome.kernel_error >= SMALL_ERROR:
        kernels += f" {advice.calibrate} would keep the outputs closer."
    if is_calibrated:
        kernels += " Their outputs were fitted instead."
    lines = [kernels]
    if 0 < outcome.fitted_images < FEW_IMAGES:
        images = counted(outcome.fitted_images, "image")
        lines.append(f"Fitted to {images} only: some dozens would keep the outputs closer.")
    if outcome.images:
        lines += _comparison_sentences(outcome)
    elif is_calibrated:
        lines.append("No image was held out, so nothing says how far the outputs moved.")
    return lines


def _comparison_sentences(outcome: Outcome) -> list[str]:
    """How close the outputs for held-out images stayed, and a yardstick."""
    agreement = _agreement(outcome, outcome.images)
    images = counted(outcome.images, "held-out image")
    if outcome.images_cropped:
        images = f"{outcome.images} crops of {counted(outcome.images_cropped, 'held-out image')}"
    lines = [f"On {images}: {agreement}."]
    if outcome.shifted is not None:
        shifted = _agreement(outcome.shifted, outcome.images)
        lines.append(f"As a yardstick, the original with each image moved by one pixel: {shifted}.")
    return lines


def _agreement(found: Outcome | Agreement, images: int) -> str:
    """How far outputs for so many images agree, as part of a sentence."""
    parts = []
    if found.same_top1 is not None:
        same = f"{round(found.same_top1 * images)} of {images} have the same top-1 class as before"
        if images >= MIN_IMAGES_FOR_PERCENT:
            same += f" ({100 * found.same_top1:.0f} %)"
        parts.append(same)
    if found.kl is not None:
        parts.append(f"KL divergence {found.kl:.2g}")
    if found.output_error is not None:
        parts.append(f"relative error of the outputs {found.output_error:.3f}")
    return ", ".join(parts) or "outputs that cannot be compared"


def next_steps(resolved: ResolvedRequest, done: Conversion, output: Path) -> list[str | Text]:
    """Lines below the report: what was written, how to fine-tune it, and how outputs changed."""
    request = resolved.request
    lines: list[str | Text] = ["", f"Wrote {output}, from {_start(resolved)}."]
    is_random = resolved.elements is None and resolved.init == "random"
    if is_random and request.positions == "normal":
        lines += NEAR_THE_CENTRE
    heading = "Fine-tune it:" if request.trained else "Train it:"
    lines.append(Text(f"{heading}\n", style="bold"))
    code = with_folder(training_code(done.report.model, trained=request.trained), output)
    lines += textwrap.indent(code, "    ").splitlines()
    outcome = done.report.outcome
    if outcome is not None:
        lines += ["", *outcome_sentences(done.report)]
    has_compared_images = outcome is not None and bool(outcome.images)
    if done.moved is not None and not has_compared_images:
        lines.append(f"Outputs for random images moved by {100 * done.moved:.2g} %.")
    return lines


def _start(resolved: ResolvedRequest) -> str:
    """What the new layers start from, as part of a sentence."""
    request = resolved.request
    random_start = f"random initialisation (seed {request.seed})"
    if resolved.elements is not None:
        return "the authors' elements and positions; it gives the outputs of their network"
    if resolved.init == EXACT:
        source = random_start
        if request.trained:
            source = "the trained weights"
        every_cell = "every old cell is an element at its place"
        return f"{source}; {every_cell}, so that the outputs are the old ones"
    if not request.trained:
        return f"{random_start}; --pretrained or --checkpoint load weights"
    if resolved.init == "random":
        return "trained weights, but random elements in the new layers"
    if resolved.init == "largest":
        return "the trained kernels, reduced to their largest cells"
    if request.calibration is not None:
        return "the trained network, fitted to its outputs on your images"
    return "the trained kernels, to which the elements are fitted"
