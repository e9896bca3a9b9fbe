"""How a report looks: tables for the terminal and the model card, what to say of them, and what to do next."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.save import training_code
from ..depthwise.geometry import size_text
from ..errors import filled, printable, shown
from ..networks.outputs import Agreement
from ..options import EXACT, MOST_SLOWER
from ..pipeline import Conversion, Job
from ..planning.plan import ConversionPlan
from ..reports.report import Change, ConversionReport, LayerReport, Outcome, predict_report
from ..tables import Column, Table, counted, indented, span
from .counts import arrow, exact, in_one_unit, percent, short_arrow

COSTLY = 50.0  # percent more MACs
WHY_SCOPE = {"model": ", as in the paper", "error": ", the default with images"}
SMALL_ERROR = 1e-3  # of kernels; below, the outputs are the old ones as far as a user would ask
NEAR_THE_CENTRE = (
    "Elements start near the centre, as in the paper, and need a long training to move;",
    "for a short one, --positions uniform spreads them.",
)
FOLDING_SENTENCE = (
    " Folding the kernels into plain convolutions keeps the outputs and these MACs, saves the construction, and stores "
    "window-sized kernels."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """The replaced layers of one stage; or one layer, where each has a row of its own."""

    layers: tuple[LayerReport, ...]
    name: str = ""

    @property
    def kernels(self) -> str:
        """ "7x7 → 17x17"."""
        olds, news = (
            {getattr(layer, size) for layer in self.layers}
            for size in ("kernel_size", "dilated_size")
        )
        return f"{span(olds, size_text)} → {span(news, size_text)}"

    @property
    def counts(self) -> str:
        """ "34", or "29..40"."""
        return span({layer.kernel_count for layer in self.layers})

    @property
    def params(self) -> Change:
        """With biases, and with positions, which count where they are first used."""
        return self._total("params")

    @property
    def macs(self) -> Change:
        """For one image; unknown where the model could not be traced."""
        return self._total("macs")

    @property
    def error(self) -> float | None:
        """The mean relative error of the kernels; None where they were not made from trained ones."""
        errors = [layer.fit_error for layer in self.layers if layer.fit_error is not None]
        return sum(errors) / len(errors) if errors else None

    def _total(self, unit: str) -> Change:
        before, after = (
            [getattr(layer, f"{unit}_{when}") for layer in self.layers]
            for when in ("before", "after")
        )
        return (
            Change() if None in (*before, *after) else Change(before=sum(before), after=sum(after))
        )


def stage_rows(layers: Iterable[LayerReport]) -> list[StageRow]:
    """A row for each stage, in the layers' order."""
    stages: dict[str, list[LayerReport]] = {}
    for layer in layers:
        stages.setdefault(layer.stage or "(no stage)", []).append(layer)
    return [StageRow(name=name, layers=tuple(members)) for name, members in stages.items()]


COLUMNS: list[Column[StageRow]] = [
    Column("Stage", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column("Kernel", lambda row: row.kernels, left=True),
    Column("Count", lambda row: row.counts),
]


def plan_view(plan: ConversionPlan) -> RenderableType:
    """The report that a plan predicts."""
    return report_view(predict_report(plan))


def report_view(report: ConversionReport, *, verbose: int = 0) -> RenderableType:
    """For a terminal of 80 columns or more; from `verbose=1` on a row a layer, from 2 on what is kept by name."""
    params, layers = report.params, StageRow(layers=report.layers)
    slower = 100 * report.macs.delta / (report.macs.before or 1) if report.macs.delta else 0.0
    # Colours repeat what the numbers and words say.
    bad, so_so = (
        report.budget.slack < 0 or slower > COSTLY,
        (params.delta or 0) > 0 or slower > MOST_SLOWER,
    )
    style = (
        "bold red" if bad else "bold yellow" if so_so else "bold green" if params.delta else "bold"
    )
    verdict = f"{arrow(params)} parameters ({percent(params)})"
    if report.macs.delta is not None:
        verdict += f", {short_arrow(report.macs)} MACs ({percent(report.macs, 1)})"
    size = f", input {size_text(report.input_size)}" if report.input_size else ""
    model = printable(f": {report.model or 'model'}{', folded' * report.folded}{size}")
    short = (report.model or "MODEL").removeprefix("timm:")
    kernels = f"{layers.counts} elements in {span({layer.dilated_size for layer in report.layers}, size_text)}"
    parts: list[RenderableType] = [Text(verdict, style=style)]
    parts.append(Text(kernels) + Text(model, style="dim"))
    if slower > COSTLY:
        sizes = f"cheaper sizes: dcls-convert sweep {printable(short)}"
        parts.append(Text(f"{1 + slower / 100:.1f} times the MACs; {sizes}", style="yellow"))
    same = [
        layer
        for layer in report.layers
        if math.prod(layer.kernel_size) == math.prod(layer.dilated_size)
    ]
    if fewer := [layer for layer in same if layer.kernel_count < math.prod(layer.kernel_size)]:
        few = f"No larger window, and fewer weights, for {counted(len(fewer), 'layer')} of {len(report.layers)}"
        parts.append(Text(f"{few}; a rule can skip such", style="yellow"))
    parts.append(Text())
    convolutions = counted(len(report.skipped), "convolution")
    if not verbose:
        lines = [_budget(report), *[f"{convolutions} kept; -v says why."] * bool(report.skipped)]
        return Group(*parts, _stage_table(report), Text(), *map(indented, lines))

    def layer_params(row: StageRow) -> str:
        (layer,) = row.layers
        return arrow(row.params) + (
            "*" if layer.tie_group is not None and layer.position_params > 0 else " "
        )

    rows = [StageRow(name=layer.name, layers=(layer,)) for layer in report.layers]
    parts.append(
        _costs_table([Column("Layer", lambda row: row.name), *COLUMNS[2:]], rows, layer_params)
    )
    if any(layer.tie_group for layer in report.layers):
        parts.append(
            Text(
                "* with the positions that the next layers of its tie group share",
                style="dim italic",
            )
        )
    parts += [Text(), _totals(report), Text(), *map(indented, _sentences(report))]
    if report.skipped:
        kinds = Counter((skip.type, skip.reason) for skip in report.skipped).most_common()
        kept = [f"{count} x {type_}: {reason}" for (type_, reason), count in kinds]
        if verbose > 1:
            kept = [f"{shown(skip.name)} ({skip.type}): {skip.reason}" for skip in report.skipped]
        parts += [Text(), Text(f" Kept as they are ({convolutions}):")]
        parts += [indented(line, "dim", by=3) for line in kept]
    return Group(*parts)


def report_markdown(report: ConversionReport) -> str:
    """The report for a model card."""
    lines = "".join(f"- {line}\n" for line in _sentences(report))
    return "\n".join([_stage_table(report).markdown(), _totals(report).markdown(), lines])


def _stage_table(report: ConversionReport) -> Table[StageRow]:
    return _costs_table(COLUMNS, stage_rows(report.layers), lambda row: arrow(row.params))


def _costs_table(
    columns: Sequence[Column[StageRow]], rows: Sequence[StageRow], params: Callable[[StageRow], str]
) -> Table[StageRow]:
    macs, unit = in_one_unit(count for row in rows for count in (row.macs.before, row.macs.after))
    costs: list[Column[StageRow]] = [
        Column("Parameters", params),
        Column(f"MACs{unit}", lambda row: arrow(row.macs, macs)),
        Column("Error", lambda row: row.error, "{:.3f}".format),
    ]
    return Table([*columns, *costs], rows)


def _totals(report: ConversionReport) -> Table[tuple[str, Change]]:
    rows = [
        ("Parameters", report.params),
        ("  replaced layers", StageRow(layers=report.layers).params),
        (
            "  everything else",
            Change(before=report.params_untouched, after=report.params_untouched),
        ),
        ("MACs", report.macs),
    ]
    columns: list[Column[tuple[str, Change]]] = [
        Column("Whole model", lambda row: row[0]),
        Column("Before", lambda row: exact(row[1].before)),
        Column("After", lambda row: exact(row[1].after)),
        Column("Change", lambda row: exact(row[1].delta, "+")),
        Column("", lambda row: None if row[0].startswith(" ") else percent(row[1])),
    ]
    return Table(columns, rows, style=lambda row: "dim" if row[0].startswith(" ") else "bold")


def _budget(report: ConversionReport) -> str:
    budget, bound = report.budget, ""
    if budget.exact_count is not None:
        bound = f"{budget.units[0].kernel_count} of {budget.exact_count:.2f} elements; "
    over = "" if budget.slack >= 0 else f", OVER BUDGET by {-budget.slack:,}"
    folding = " before folding" * report.folded
    scope = f"{budget.scope}{WHY_SCOPE.get(budget.scope, '')}"
    return f"Budget ({scope}){folding}: {bound}{budget.used:,} of {budget.limit:,} used{over}."


def _sentences(report: ConversionReport) -> list[str]:
    weights, plain = (
        report.params.weights,
        all(layer.interpolation == "bilinear" for layer in report.layers),
    )
    if report.folded:
        kernels = f"Folded into plain convolutions: {weights:,} weights, one for every cell of the windows"
    else:
        positions = "positions" if plain else "positions and sigmas"
        kernels = f"New kernels: {weights:,} weights and {report.params.positions:,} {positions}"
    lines = [_budget(report), f"{kernels}; stages from {report.stages_from}."]
    if report.macs.note:
        lines.append(f"MACs were not counted: {report.macs.note}.")
    else:
        held = (report.params.delta or 0) <= 0
        rise = f"MACs rise {'although parameters do not' if held else 'with the window'}"
        lines.append(
            f"{rise}: every window cell is multiplied, empty or not.{FOLDING_SENTENCE * (not report.folded)}"
        )
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
    lines = [
        kernels,
        f"Images held out, with corners of large ones: {_agreement(outcome, outcome.images)}.",
    ]
    if outcome.shifted is not None:
        shifted = _agreement(outcome.shifted, outcome.images)
        lines.append(f"As a yardstick, the original with each image moved by one pixel: {shifted}.")
    return lines


def _agreement(found: Outcome | Agreement, images: int) -> str:
    parts = []
    if found.same_top1 is not None:
        same, share = round(found.same_top1 * images), 100 * found.same_top1
        parts.append(f"{same} of {images} have the same top-1 class as before ({share:.0f} %)")
    if found.kl is not None:
        parts.append(f"KL divergence {found.kl:.2g}")
    if found.output_error is not None:
        parts.append(f"relative error of the outputs {found.output_error:.3f}")
    return ", ".join(parts) or "outputs that cannot be compared"


def next_steps(job: Job, done: Conversion, output: Path) -> list[str | Text]:
    """Lines for the terminal, below the report."""
    code = filled(training_code(done.report.model, trained=job.trained), output).splitlines()
    near = (
        NEAR_THE_CENTRE
        if job.elements is None and job.how == "random" and job.positions == "normal"
        else ()
    )
    lines: list[str | Text] = [
        "",
        f"Wrote {output}, from {_start(job)}.",
        *near,
        Text("Fine-tune it:\n", style="bold"),
    ]
    lines += [f"    {line}" if line else "" for line in code]
    outcome = done.report.outcome
    if outcome:
        lines += ["", *outcome_sentences(done.report)]
    if done.moved is not None and not (outcome and outcome.images):
        lines.append(f"Outputs for random images moved by {100 * done.moved:.2g} %.")
    return lines


def _start(job: Job) -> str:
    """What the new layers start from."""
    if job.elements is not None:
        return "the authors' elements and positions; it gives the outputs of their network"
    if job.how == EXACT:
        source = (
            "the trained weights" if job.trained else f"random initialisation (seed {job.seed})"
        )
        return f"{source}; every old cell is an element at its place, so that the outputs are the old ones"
    if not job.trained:
        return f"random initialisation (seed {job.seed}); --pretrained or --checkpoint load weights"
    if job.how == "random":
        return "trained weights, but random elements in the new layers"
    if job.how == "largest":
        return "the trained kernels, reduced to their largest cells"
    return f"the trained kernels, with elements fitted to {'what they give for images' if job.calibration else 'them'}"
