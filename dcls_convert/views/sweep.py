"""A sweep as a table for the terminal, as CSV, and as a picture of costs and gains."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from ..choosing.results import Sweep, SweepRow, Timing, done_rows, objectives, percent_increase
from ..geometry import size_text
from ..options import DEFAULT_BUDGET
from ..tables import Column, Table, field_column, indented, title
from ..text import count_text, join_with_and, printable, range_text
from .number_text import decimals_for, in_one_unit, with_separators
from .plot import figure_file, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[SweepRow], Any]  # returns a row's value along one axis of the picture
# Signs in front of the rows of the table, which the styles of the rows repeat.
RECOMMENDED = ">"
DOMINATED = "-"
UNPLANNED = "!"
SIGN_STYLES = {RECOMMENDED: "bold green", DOMINATED: "dim", UNPLANNED: "yellow", "": ""}
UNTRAINED = (
    "Without further training, converting a trained network gains nothing and adds MACs; it is a "
    "starting point for training."
)
PAPER = (
    "Only training shows the accuracy. In the paper, ConvNeXt was worse below 17x17 "
    "and no better above; ResNet-50 used 7x7."
)
MARKERS = "o^Dvs*"
MACS = "MACs"
SWEEP_STYLE = {
    "figure.dpi": 150,
    "legend.fontsize": 8,
    "legend.framealpha": 1,
    "legend.edgecolor": "none",
}


@dataclass(frozen=True, slots=True)
class SweepView:
    """A sweep as it is shown in a terminal of at least 80 columns: a table, and notes on it.

    A table that is too wide is split into two.
    """

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sweep = self.sweep
        keys = _key_columns(sweep)
        costs = _cost_columns(sweep)
        make_table = functools.partial(Table, style=lambda row: SIGN_STYLES[_sign(sweep, row)])
        whole_table = make_table([*keys, *costs, *MEASURED_COLUMNS], sweep.rows)
        tables = [whole_table]
        measured_rows = []
        for row in sweep.rows:
            if any(column.is_known([row]) for column in MEASURED_COLUMNS):
                measured_rows.append(row)
        if measured_rows and whole_table.surplus(console, options) > 0:
            costs_table = make_table([*keys, *costs], sweep.rows)
            measured_table = make_table([*keys, *MEASURED_COLUMNS], measured_rows)
            tables = [costs_table, measured_table]
        input_size = ""
        if sweep.input_size:
            input_size = f", input {size_text(sweep.input_size)}"
        yield title(sweep.model, input_size)
        for table in tables:
            yield Text()
            yield table
        yield Text()
        yield from _notes(sweep)


def python_view(sweep: Sweep) -> RenderableType:
    """Return the table and notes, and the call that converts to the recommended size."""
    if sweep.choice.command is None:
        return SweepView(sweep)
    return Group(SweepView(sweep), Text(), indented(sweep.choice.command, by=4))


def _sign(sweep: Sweep, row: SweepRow) -> str:
    """Return the sign in front of a row."""
    if sweep.choice.row is not None and row is sweep.rows[sweep.choice.row]:
        return RECOMMENDED
    if row.status in ("does not fit", "failed"):
        return UNPLANNED
    if row.dominated:
        return DOMINATED
    return ""


def _all_have(rows: list[SweepRow], field: str) -> bool:
    """True if a field is known for every row."""
    return all(getattr(row, field) is not None for row in rows)


def _all_have_images(rows: list[SweepRow]) -> bool:
    """True if all output errors are for held-out images of a calibration, not for random ones."""
    return all(row.images for row in rows)


def _key_columns(sweep: Sweep) -> list[Column[SweepRow]]:
    """Return columns for window, count and budget, and for the number of layers if it varies."""
    columns: list[Column[SweepRow]] = [
        Column("  Window", lambda row: f"{_sign(sweep, row):1} {row.window}"),
        Column("Count", _counts),
        Column("Budget", lambda row: row.asked and row.asked.budget, "{:g} %".format),
    ]
    layer_counts = {row.layers for row in done_rows(sweep.rows)}
    if len(layer_counts) > 1:
        columns.append(Column("Layers", lambda row: row.layers or None))
    return columns


def _cost_columns(sweep: Sweep) -> list[Column[SweepRow]]:
    """Return columns for parameters, MACs and the size after folding."""
    write_macs, macs_unit = in_one_unit(row.macs for row in sweep.rows)
    write_size, size_unit = in_one_unit(row.folded_bytes for row in sweep.rows)

    def added_macs(row: SweepRow) -> float | None:
        original = sweep.rows[0]
        if row.asked is None or row.macs is None or not original.macs:
            return None
        return percent_increase(row.macs, original.macs)

    def params_or_status(row: SweepRow) -> str:
        if row.params is None:
            return row.status
        return with_separators(row.params)

    return [
        Column("Parameters", params_or_status),
        Column(f"MACs{macs_unit}", lambda row: row.macs, write_macs),
        Column("", added_macs, "{:+.1f} %".format),
        Column(f"Fold{size_unit}B", lambda row: row.folded_bytes, write_size),
    ]


def _counts(row: SweepRow) -> str:
    """Return the kernel counts, or the requested count if the row could not be planned."""
    planned = range_text(row.kernel_counts)
    if planned:
        return planned
    if row.asked is None or not row.asked.kernel_count:
        return ""
    return str(row.asked.kernel_count)


def _time(timing: Timing) -> str:
    """Return "12.3 ±0.4": the median and half the interquartile range, in milliseconds."""
    half_range = (timing.third_quartile - timing.first_quartile) / 2
    digits = decimals_for(timing.median)
    return f"{timing.median:,.{digits}f} ±{half_range:,.{digits}f}"


MEASURED_COLUMNS: list[Column[SweepRow]] = [
    Column("Forward, ms", lambda row: row.forward_ms, _time),
    Column("Step, ms", lambda row: row.step_ms, _time),
    Column("Kernels", lambda row: row.kernel_error, "{:.3f}".format),
    Column("Outputs", lambda row: row.output_error, "{:.3f}".format),
    Column("Top-1", lambda row: row.same_top1, lambda share: f"{100 * share:.0f} %"),
]


def _notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield notes that explain the rows, and the recommendation."""
    rows = sweep.rows
    yield from _failure_notes(sweep)
    if any(row.dominated for row in rows):
        yield indented(_domination_note(sweep), "dim")
    yield indented("Fold: size of the weights after folding.")
    yield from _map_notes(sweep)
    if sweep.macs_note:
        yield indented(f"MACs were not counted: {sweep.macs_note}.")
    if sweep.timing is not None and any(row.forward_ms for row in rows):
        yield from _timing_notes(sweep)
    yield from _error_notes(sweep)
    if sweep.interrupted:
        yield indented("Interrupted: rows or measurements are missing.", "bold yellow")
    why = sweep.choice.why
    if sweep.choice.row is None:
        yield indented(f"No size is recommended: {why}.")
        return
    yield indented(PAPER)
    recommended = rows[sweep.choice.row]
    elements = f"{range_text(recommended.kernel_counts)} elements"
    yield indented(f"{RECOMMENDED} Take {recommended.window} with {elements}: {why}.", "bold")


def _failure_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Yield a line for each row that could not be planned, without duplicates."""
    failures = []
    for row in sweep.rows:
        failure = f"{UNPLANNED} {row.window} {row.status}: {row.reason}"
        if row.reason and failure not in failures:
            failures.append(failure)
    for failure in failures:
        yield indented(failure, "yellow")


def _map_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Say which windows have cells that never meet the feature map, and in how many layers."""
    counts: dict[str, int] = {}
    for row in sweep.rows:
        if row.layers_beyond_map:
            counts[row.window] = row.layers_beyond_map
    if counts:
        windows = ", ".join(f"{window} ({layers})" for window, layers in counts.items())
        yield indented(
            "Windows at least twice as large as the feature map at this input size, whose outer "
            f"cells meet only padding (in how many layers): {windows}."
        )


def _domination_note(sweep: Sweep) -> str:
    """Explain the sign of dominated rows, with the quantities that were compared."""
    compared = join_with_and(objectives(done_rows(sweep.rows)).names)
    return f"{DOMINATED} another row is at least as good in {compared}, and better in one."


def _timing_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Say how the times were measured, and warn if repeated runs differ too much."""
    timing = sweep.timing
    assert timing is not None
    device = timing.device
    if timing.threads:
        device += f", {count_text(timing.threads, 'thread')}"
    precision = "bfloat16 autocast" if timing.amp else "float32"
    yield indented(
        "Times: median of interleaved runs ± half the interquartile range; "
        f"{count_text(timing.batch, 'image')} at a time in {precision}, "
        f"{device}, torch {timing.torch}. Step: forward, backward, SGD."
    )
    largest_range = 0.0  # percent of the median
    for row in sweep.rows:
        step = row.step_ms
        if step is not None:
            interquartile_range = step.third_quartile - step.first_quartile
            percent_of_median = 100 * interquartile_range / step.median
            largest_range = max(largest_range, percent_of_median)
    if largest_range > sweep.slower:
        advice = "measure longer (--seconds), on an idle machine"
        yield indented(f"Repeated runs differ by {largest_range:.0f} %: {advice}.")


def _error_notes(sweep: Sweep) -> Iterator[RenderableType]:
    """Explain the errors of kernels and outputs, if any were measured."""
    image_count: int | None = None  # the same in all rows
    has_classes = False
    for row in sweep.rows:
        if row.images is not None:
            image_count = row.images
        if row.same_top1 is not None:
            has_classes = True
    if image_count is None:
        return
    images = "random images"
    if image_count:
        images = f"{count_text(image_count, 'image')} or crops held out from the calibration"
    top1 = ""
    if has_classes:
        top1 = " Top-1: share of them with the same class as before."
    yield indented(f"Kernels: mean relative error. Outputs: relative error for {images}.{top1}")
    yield indented(UNTRAINED)


def sweep_csv(sweep: Sweep) -> str:
    """Return a line for each row; unknown values are empty."""
    paths = ["window", "asked.kernel_count", "asked.budget", "status", "layers", "kernel_counts"]
    paths += ["elements", "params", "macs", "folded_bytes"]
    for measured in ("forward_ms", "step_ms"):
        for field in fields(Timing):
            paths.append(f"{measured}.{field.name}")
    paths += ["kernel_error", "images", "output_error", "same_top1", "kl", "dominated"]
    paths += ["reason", "command"]
    taken: Column[SweepRow] = Column("taken", lambda row: _sign(sweep, row) == RECOMMENDED)
    return Table([*map(field_column, paths), taken], sweep.rows).csv()


def draw_sweep(sweep: Sweep, suffix: str) -> bytes:
    """Return the picture as a file, in the format of the suffix.

    Points of dominated rows are hollow.
    """
    return figure_file(lambda: _picture(sweep), suffix, **SWEEP_STYLE)


def _picture(sweep: Sweep) -> "Figure":
    """Plot gain against cost, with the recommended row and the original marked."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    cost, x_label = _cost(sweep)
    gain, y_label = _gain(sweep)
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    drawn_rows = []
    for row in done_rows(sweep.rows):
        if cost(row) is not None:
            drawn_rows.append(row)
    _draw_series(axes, drawn_rows, cost, gain)
    if sweep.choice.row is not None:
        recommended = sweep.rows[sweep.choice.row]
        square: dict[str, Any] = {"fillstyle": "none", "markersize": 12, "label": "recommended"}
        axes.plot(cost(recommended), gain(recommended), "ks", **square)
    if any(row.dominated for row in drawn_rows):
        axes.plot([], [], "o", color="0.4", fillstyle="none", label="dominated")
    for point, text in _point_labels(drawn_rows, cost, gain).items():
        axes.annotate(text, point, xytext=(8, -11), textcoords="offset points", fontsize=8)
    original = cost(sweep.rows[0])
    if original is not None:
        axes.axvline(original, color="0.5", linestyle=":", label="original")
    axes.margins(x=0.18, y=0.12)
    if gain is _largest_side:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if x_label == MACS:
        axes.xaxis.set_major_formatter(EngFormatter())
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend()
    axes.set(xlabel=x_label, ylabel=y_label, title=printable(sweep.model))
    return figure


def _draw_series(axes: "Axes", drawn_rows: list[SweepRow], cost: Value, gain: Value) -> None:
    """Draw a line through the rows of each count or budget, in the order of the rows."""
    series: dict[str, list[SweepRow]] = {}
    for row in drawn_rows:
        series.setdefault(_series_name(row), []).append(row)
    for (name, rows), marker in zip(series.items(), itertools.cycle(MARKERS)):
        (line,) = axes.plot([*map(cost, rows)], [*map(gain, rows)], "-", linewidth=1, zorder=1)
        style: dict[str, Any] = {"marker": marker, "color": line.get_color(), "linestyle": "none"}
        for row in rows:
            fillstyle: Any = "none" if row.dominated else "full"
            axes.plot(cost(row), gain(row), fillstyle=fillstyle, **style)
        axes.plot([], [], label=name, **style)  # the entry of the legend


def _series_name(row: SweepRow) -> str:
    """Return "34 elements" or "budget 100 %"."""
    assert row.asked is not None
    if row.asked.kernel_count:
        return f"{row.asked.kernel_count} elements"
    budget = row.asked.budget
    if budget is None:
        budget = DEFAULT_BUDGET
    return f"budget {budget:g} %"


def _point_labels(rows: list[SweepRow], cost: Value, gain: Value) -> dict[tuple[float, float], str]:
    """Return the label of each point: its window, and the counts of all rows that share it."""
    labels: dict[tuple[float, float], str] = {}
    for row in rows:
        point = (cost(row), gain(row))
        counts = range_text(row.kernel_counts)
        if point in labels:
            labels[point] += f", {counts}"
        else:
            labels[point] = f"{row.window}: {counts}"
    return labels


def _largest_side(row: SweepRow) -> int:
    return max(map(max, row.dilated_sizes))


def _cost(sweep: Sweep) -> tuple[Value, str]:
    """Return the value to draw along the x axis, and the axis label."""
    if _all_have(done_rows(sweep.rows), "step_ms"):
        return attrgetter("median_step_ms"), "training step, ms"
    return attrgetter("macs"), MACS


def _gain(sweep: Sweep) -> tuple[Value, str]:
    """Return the value to draw along the y axis, and the axis label."""
    done = done_rows(sweep.rows)
    if _all_have_images(done):
        return attrgetter("output_error"), "relative error of outputs"
    if _all_have(done, "kernel_error"):
        return attrgetter("kernel_error"), "relative error of kernels"
    return _largest_side, "window, cells"
