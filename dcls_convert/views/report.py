"""How a report looks: rich tables for the terminal, Markdown for the model card. Formatting only."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..depthwise.geometry import size_text
from ..errors import printable, shown
from ..reports.report import Change, ConversionReport, LayerReport
from ..tables import Name, counted, plain_table, span
from .plan import OUTSIDE

NOT_COUNTED = "n/a"
SMALL_ERROR = 1e-3  # of kernels; below, the outputs are the old ones as far as a user would ask
MACS_SENTENCE = "every window cell is multiplied, empty or not."
FOLDING_SENTENCE = (
    "Folding the kernels into plain convolutions keeps the outputs and these MACs, saves the construction, and stores "
    "window-sized kernels."
)


def report_view(report: ConversionReport, *, verbose: int = 0) -> RenderableType:
    """The report for a terminal of 80 columns or more: the verdict, and a row a stage.

    Args:
        verbose: From 1 on, a row a layer, sums, explanations, and by reason what is left alone; from 2 on by name, too.
    """
    if not verbose:
        kept = f"{counted(len(report.skipped), 'convolution')} kept; -v says why." if report.skipped else ""
        notes = [_paragraph(line) for line in (_budget(report), kept) if line]
        return Group(*_verdict(report), Text(), _stage_table(report.layers), Text(), *notes)
    parts: list[RenderableType] = [*_verdict(report), Text(), _layer_table(report.layers), Text(), _totals(report)]
    parts += [Text(), *map(_paragraph, _sentences(report))]
    if report.skipped:
        parts += [Text(), *_skipped(report, all_names=verbose > 1)]
    return Group(*parts)


def _paragraph(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 1), expand=False)


def _verdict(report: ConversionReport) -> list[Text]:
    """Two lines: the whole model's counts, and what it got."""
    params, over = report.params, report.budget.slack < 0
    # Colours repeat what the numbers and words say.
    style = "bold red" if over else "bold" if not params.delta else "bold green" if params.delta < 0 else "bold yellow"
    changes = [f"{_arrow(params)} parameters ({_percent(params)})"]
    if report.macs.before is not None and report.macs.after is not None:
        changes.append(f"{short_arrow(report.macs)} MACs ({_percent(report.macs, 1)})")
    kernels = f"{span({layer.kernel_count for layer in report.layers})} elements in "
    kernels += span({layer.dilated_size for layer in report.layers}, size_text)
    name = f"{printable(report.model or 'model')}{', folded' * report.folded}"
    size = f", input {size_text(report.input_size)}" if report.input_size else ""
    lines = [Text(", ".join(changes), style=style), Text(kernels) + Text(f": {name}{size}", style="dim")]
    return [line for line in lines if line]


def report_markdown(report: ConversionReport) -> str:
    """The report as Markdown tables, a row a stage."""
    fitted = _fitted(report.layers)
    rows = [
        f"| stage | layers | kernel | count | parameters | MACs |{' error |' * fitted}",
        f"| --- | ---: | --- | ---: | ---: | ---: |{' ---: |' * fitted}",
    ]
    for cells, macs, members in _stage_rows(report.layers):
        rows.append(f"| {' | '.join([*cells, _arrow(macs), *[_error(members)] * fitted])} |")
    rows += ["", "| total | before | after | change |", "| --- | ---: | ---: | ---: |"]
    for name, change in [("parameters", report.params), ("MACs", report.macs)]:
        rows.append(f"| {name} | {_exact(change.before)} | {_exact(change.after)} | {_delta(change)} |")
    return "\n".join([*rows, "", *[f"- {line}" for line in _sentences(report)]]) + "\n"


def _stage_table(layers: Sequence[LayerReport]) -> Table:
    fitted, (macs, unit) = _fitted(layers), _one_unit([macs for _, macs, _ in _stage_rows(layers)])
    table = plain_table("Stage", "Layers", "Kernel", "Count", "Parameters", f"MACs{unit}", *["Error"] * fitted)
    for (cells, _, members), change in zip(_stage_rows(layers), macs, strict=True):
        table.add_row(Name(cells[0]), *cells[1:], change, *[_error(members)] * fitted)
    return table


def _layer_table(layers: Sequence[LayerReport]) -> Table:
    fitted, (macs, unit) = _fitted(layers), _one_unit([_total([layer], "macs") for layer in layers])
    table = plain_table("Layer", "Kernel", "Count", "Parameters", f"MACs{unit}", *["Error"] * fitted)
    for layer, change in zip(layers, macs, strict=True):
        first_of_group = layer.tie_group is not None and layer.position_params > 0
        table.add_row(
            Name(layer.name),
            _kernels([layer]).replace(" ", ""),
            str(layer.kernel_count),
            _arrow(_total([layer], "params")) + ("*" if first_of_group else " "),
            change,
            *[_error([layer])] * fitted,
        )
    if any(layer.tie_group for layer in layers):
        table.caption = "* with the positions that the next layers of its tie group share"
        table.caption_justify = "left"
    return table


def _one_unit(changes: Sequence[Change]) -> tuple[list[str], str]:
    """What stands in a column, and its unit for the heading."""
    short, unit = in_one_unit([count for change in changes for count in (change.before, change.after)])
    return [
        NOT_COUNTED if None in (c.before, c.after) else f"{short(c.before)} → {short(c.after)}" for c in changes
    ], unit


def in_one_unit(counts: Sequence[int | None]) -> tuple[Callable[[int | None], str], str]:
    """How a column states each of its counts, and its unit for the heading: that of the smallest count."""
    least = min(filter(None, counts), default=1)
    unit, name = _unit(least)
    digits = 0 if unit == 1 else 2 if least < 10 * unit else 1 if least < 100 * unit else 0
    return lambda count: NOT_COUNTED if count is None else f"{count / unit:,.{digits}f}", f",{name}" if name else ""


def _totals(report: ConversionReport) -> Table:
    table = plain_table("Whole model", "Before", "After", "Change", "")
    untouched = Change(before=report.params_untouched, after=report.params_untouched)
    for name, change, style in [
        ("Parameters", report.params, "bold"),
        ("  replaced layers", _total(report.layers, "params"), "dim"),
        ("  everything else", untouched, "dim"),
        ("MACs", report.macs, "bold"),
    ]:
        percent = "" if style == "dim" else _percent(change)
        counts = (_exact(change.before), _exact(change.after), _exact(change.delta, "+"))
        table.add_row(name, *counts, percent, style=style)
    return table


def _budget(report: ConversionReport) -> str:
    budget = report.budget
    exact = budget.exact_count
    bound = "" if exact is None else f"{budget.units[0].kernel_count} of {exact:.2f} elements; "
    slack = f"{budget.slack:,} left" if budget.slack >= 0 else f"OVER BUDGET by {-budget.slack:,}"
    folding = " before folding" * report.folded
    return f"Budget ({budget.scope}){folding}: {bound}{budget.used:,} of {budget.limit:,} used, {slack}."


def _sentences(report: ConversionReport) -> list[str]:
    lines = [_budget(report), f"{_new_kernels(report)}; stages from {report.stages_from}."]
    if report.macs.note:
        lines.append(f"MACs were not counted: {report.macs.note}.")
    else:
        held = (report.params.delta or 0) <= 0
        rise = "MACs rise although parameters do not: " if held else "MACs rise with the window: "
        lines.append(rise + MACS_SENTENCE + ("" if report.folded else f" {FOLDING_SENTENCE}"))
    return [printable(line) for line in [*lines, *outcome_sentences(report)]]


def outcome_sentences(report: ConversionReport) -> list[str]:
    """What the conversion did to the function of a trained network; nothing where that is not known."""
    outcome = report.outcome
    if outcome is None or outcome.kernel_error is None:
        return []
    kernels = f"Mean relative error of the kernels: {outcome.kernel_error:.3f}."
    if not outcome.images:
        better = " --calibrate FOLDER, with some images, would keep the outputs closer."
        return [kernels + better * (outcome.kernel_error >= SMALL_ERROR)]
    found = []
    if outcome.same_top1 is not None:
        same, share = round(outcome.same_top1 * outcome.images), 100 * outcome.same_top1
        found.append(f"{same} of {outcome.images} have the same top-1 class as before ({share:.0f} %)")
    if outcome.output_error is not None:
        found.append(f"the outputs' relative error is {outcome.output_error:.3f}")
    return [kernels, f"Images held out of the calibration: {', and '.join(found) or f'{outcome.images}'}."]


def _new_kernels(report: ConversionReport) -> str:
    if report.folded:
        return f"Folded into plain convolutions: {report.params.weights:,} weights, one for every cell of the windows"
    plain = all(layer.interpolation == "bilinear" for layer in report.layers)
    positions = "positions" if plain else "positions and sigmas"
    return f"New kernels: {report.params.weights:,} weights and {report.params.positions:,} {positions}"


def _skipped(report: ConversionReport, *, all_names: bool) -> list[RenderableType]:
    if all_names:
        rows = [f"{shown(skip.name)} ({skip.type}): {skip.reason}" for skip in report.skipped]
    else:
        kinds = Counter((skip.type, skip.reason) for skip in report.skipped).most_common()
        rows = [f"{count} x {type_}: {reason}" for (type_, reason), count in kinds]
    head = Text(f" Kept as they are ({counted(len(report.skipped), 'convolution')}):")
    return [head, *[Padding(Text(printable(row), style="dim"), (0, 0, 0, 3), expand=False) for row in rows]]


def _fitted(layers: Sequence[LayerReport]) -> bool:
    """Whether kernels came from trained ones, so that there are errors to state."""
    return any(layer.fit_error is not None for layer in layers)


def _error(layers: Sequence[LayerReport]) -> str:
    """The mean relative error of the kernels."""
    errors = [layer.fit_error for layer in layers if layer.fit_error is not None]
    return f"{sum(errors) / len(errors):.3f}" if errors else NOT_COUNTED


def _stage_rows(layers: Sequence[LayerReport]) -> Iterator[tuple[list[str], Change, list[LayerReport]]]:
    """For each stage: name, number of layers, kernels, counts and parameters as text; the MACs; the layers."""
    stages: dict[str, list[LayerReport]] = {}
    for layer in layers:
        stages.setdefault(printable(layer.stage or OUTSIDE), []).append(layer)
    for stage, members in stages.items():
        counts = span({layer.kernel_count for layer in members})
        params = _arrow(_total(members, "params"))
        yield [stage, str(len(members)), _kernels(members), counts, params], _total(members, "macs"), members


def _total(layers: Sequence[LayerReport], unit: str) -> Change:
    """Of "params" or "macs" of all these layers."""
    before, after = ([getattr(layer, f"{unit}_{when}") for layer in layers] for when in ("before", "after"))
    return Change() if None in (*before, *after) else Change(before=sum(before), after=sum(after))


def _kernels(layers: Sequence[LayerReport]) -> str:
    old, new = ({getattr(layer, size) for layer in layers} for size in ("kernel_size", "dilated_size"))
    return f"{span(old, size_text)} → {span(new, size_text)}"


def short_arrow(macs: Change) -> str:
    """4455531264 and 4970337024 -> "4.46 → 4.97 G"."""
    if macs.before is None or macs.after is None:
        return NOT_COUNTED
    unit, name = _unit(macs.before)
    return f"{_short(macs.before / unit)} → {_short(macs.after / unit)}{name}"


def short_count(count: int | None) -> str:
    """4455531264 -> "4.46 G"."""
    if count is None:
        return NOT_COUNTED
    unit, name = _unit(count)
    return f"{_short(count / unit)}{name}"


def _short(value: float) -> str:
    """Three digits, or all before the point: 4.46, 44.3, 15,900."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}" if value % 1 else f"{value:,.0f}"


def _percent(change: Change, digits: int = 2) -> str:
    return "" if change.percent is None else f"{change.percent:+.{digits}f} %"


def _unit(count: int) -> tuple[float, str]:
    units = [(1e9, " G"), (1e6, " M"), (1e3, " k"), (1, "")]
    return next((unit for unit in units if count >= unit[0]), units[-1])


def _exact(count: int | None, sign: str = "") -> str:
    return NOT_COUNTED if count is None else f"{count:{sign},}"


def _delta(change: Change) -> str:
    return _exact(change.delta, "+") + (f" ({_percent(change)})" if change.percent is not None else "")


def _arrow(change: Change) -> str:
    return f"{_exact(change.before)} → {_exact(change.after)}"
