"""How a sweep looks: a table for the terminal, CSV, and a picture of what each row costs and gains."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from ..compare.sweep import Sweep, SweepRow, Timing, Value, growth, step_ms
from ..depthwise.geometry import size_text
from ..errors import printable
from ..options import DEFAULT_BUDGET
from ..tables import Column, Table, counted, field_column, indented, span, title
from .counts import exact, in_one_unit
from .plot import new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TAKEN, DOMINATED, WITHOUT = ">", "-", "!"  # signs before rows; colours repeat them
PAPER = (
    "Only training shows the accuracy. In the paper, ConvNeXt lost with windows below 17x17 and gained nothing above; "
    "ResNet-50 had 7x7."
)
MARKERS = "o^Dvs*"
MACS = "MACs"
STYLE = {
    "figure.dpi": 150,
    "legend.fontsize": 8,
    "legend.framealpha": 1,
    "legend.edgecolor": "none",
}


@dataclass(frozen=True, slots=True)
class SweepView:
    """The rows and what to say of them, for 80 columns or more; in two tables, where one is too wide."""

    sweep: Sweep

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sweep, (keys, costs, measured) = self.sweep, _columns(self.sweep)
        table = functools.partial(Table, style=lambda row: _sign(sweep, row)[1])
        tables = [table([*keys, *costs, *measured], sweep.rows)]
        rows = [
            row for row in sweep.rows if any(column.value(row) is not None for column in measured)
        ]
        if rows and tables[0].surplus(console, options) > 0:
            tables = [table([*keys, *costs], sweep.rows), table([*keys, *measured], rows)]
        yield title(
            sweep.model, f", input {size_text(sweep.input_size)}" if sweep.input_size else ""
        )
        for each in tables:
            yield Text()
            yield each
        yield Text()
        yield from _notes(self.sweep)


def _sign(sweep: Sweep, row: SweepRow) -> tuple[str, str]:
    if sweep.choice.row is not None and row is sweep.rows[sweep.choice.row]:
        return TAKEN, "bold green"
    if row.status in ("does not fit", "failed"):
        return WITHOUT, "yellow"
    return (DOMINATED, "dim") if row.dominated else ("", "")


def _columns(
    sweep: Sweep,
) -> tuple[list[Column[SweepRow]], list[Column[SweepRow]], list[Column[SweepRow]]]:
    """What names a row, what it costs, and what was measured of it."""
    rows, original = sweep.rows, sweep.rows[0]
    macs, macs_unit = in_one_unit(row.macs for row in rows)
    size, size_unit = in_one_unit(row.folded_bytes for row in rows)
    several = len({row.layers for row in rows if row.status == "done"}) > 1

    def grown(row: SweepRow) -> float | None:
        known = row.asked is not None and row.macs is not None and original.macs
        return growth(row, original, lambda row: row.macs) if known else None

    keys: list[Column[SweepRow]] = [
        Column("  Window", lambda row: f"{_sign(sweep, row)[0]:1} {row.window}"),
        Column(
            "Count",
            lambda row: (
                span(row.kernel_counts) or str((row.asked and row.asked.kernel_count) or "")
            ),
        ),
        Column("Budget", lambda row: row.asked and row.asked.budget, "{:g} %".format),
        Column("Layers", lambda row: row.layers or None if several else None),
    ]
    costs: list[Column[SweepRow]] = [
        Column("Parameters", lambda row: row.status if row.params is None else exact(row.params)),
        Column(f"MACs{macs_unit}", lambda row: row.macs, macs),
        Column("", grown, "{:+.1f} %".format),
        Column(f"Fold{size_unit}B", lambda row: row.folded_bytes, size),
    ]
    measured: list[Column[SweepRow]] = [
        Column("Forward, ms", lambda row: row.forward_ms, _time),
        Column("Step, ms", lambda row: row.step_ms, _time),
        Column("Kernels", lambda row: row.kernel_error, "{:.3f}".format),
        Column("Outputs", lambda row: row.output_error, "{:.3f}".format),
        Column("Top-1", lambda row: row.same_top1, lambda share: f"{100 * share:.0f} %"),
    ]
    return keys, costs, measured


def _time(timing: Timing) -> str:
    spread = (timing.third_quartile - timing.first_quartile) / 2
    digits = 0 if timing.median >= 99.95 else 1 if timing.median >= 9.995 else 2
    return f"{timing.median:,.{digits}f} ±{spread:,.{digits}f}"


def _notes(sweep: Sweep) -> Iterator[RenderableType]:
    rows, choice, timing = sweep.rows, sweep.choice, sweep.timing
    for reason in dict.fromkeys(
        f"{WITHOUT} {row.window} {row.status}: {row.reason}" for row in rows if row.reason
    ):
        yield indented(reason, "yellow")
    if any(row.dominated for row in rows):
        done = [row for row in rows if row.status == "done"]
        timed, fitted = (
            all(getattr(row, name) is not None for row in done)
            for name in ("step_ms", "kernel_error")
        )
        error = f"error of {'outputs' if all(row.images for row in done) else 'kernels'}"
        compared = f"{'times' if timed else 'MACs'} and {error if fitted else 'number of elements'}"
        yield indented(
            f"{DOMINATED} another row is as good in window, parameters, {compared}, and better in one.",
            "dim",
        )
    yield indented("Fold: the model's weights when folded.")
    if sweep.macs_note:
        yield indented(f"MACs were not counted: {sweep.macs_note}.")
    if timing is not None and any(row.forward_ms for row in rows):
        threads = f", {counted(timing.threads, 'thread')}" if timing.threads else ""
        yield indented(
            f"Times: median of runs by turns ± half the interquartile range; {counted(timing.batch, 'image')} at a "
            f"time in {'bfloat16 autocast' if timing.amp else 'float32'}, {timing.device}{threads}, torch "
            f"{timing.torch}. Step: forward, backward, SGD."
        )
        steps = [row.step_ms for row in rows if row.step_ms]
        widest = max(
            (100 * (step.third_quartile - step.first_quartile) / step.median for step in steps),
            default=0,
        )
        if widest > sweep.slower:
            yield indented(
                f"Equal runs differ by {widest:.0f} %: measure longer (--seconds), on an idle machine."
            )
    images = next((row.images for row in rows if row.images is not None), None)
    if images is not None:
        compared = (
            f"{counted(images, 'image')} held out of the calibration" if images else "random images"
        )
        top1 = " Top-1: share of them with the same class as before." * any(
            row.same_top1 is not None for row in rows
        )
        yield indented(
            f"Kernels: mean relative error. Outputs: relative error for {compared}.{top1}"
        )
    if sweep.interrupted:
        yield indented("Interrupted: rows or measurements are missing.", "bold yellow")
    if choice.row is None:
        yield indented(f"No size is recommended: {choice.why}.")
        return
    yield indented(PAPER)
    taken = rows[choice.row]
    yield indented(
        f"{TAKEN} Take {taken.window} with {span(taken.kernel_counts)} elements: {choice.why}.",
        "bold",
    )


def sweep_csv(sweep: Sweep) -> str:
    """A line for each row; a value that is not known is empty."""
    times = (
        f"{part}.{field.name}" for part in ("forward_ms", "step_ms") for field in fields(Timing)
    )
    paths = [
        "window",
        "asked.kernel_count",
        "asked.budget",
        "status",
        "layers",
        "kernel_counts",
        "elements",
        "params",
    ]
    paths += [
        "macs",
        "folded_bytes",
        *times,
        "kernel_error",
        "images",
        "output_error",
        "same_top1",
        "kl",
        "dominated",
    ]
    paths += ["reason", "command"]
    taken: Column[SweepRow] = Column("taken", lambda row: _sign(sweep, row)[0] == TAKEN)
    return Table([*map(field_column, paths), taken], sweep.rows).csv()


def draw_sweep(sweep: Sweep, suffix: str) -> bytes:
    """The picture as a file, in the format of the suffix. The points of dominated rows are hollow."""
    return saved(lambda: _picture(sweep), suffix, **STYLE)


def _picture(sweep: Sweep) -> "Figure":
    from matplotlib.ticker import EngFormatter, MaxNLocator

    (cost, x_label), (gain, y_label) = _axes(sweep)
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    points = [row for row in sweep.rows if row.status == "done" and cost(row) is not None]
    series: dict[
        str, list[SweepRow]
    ] = {}  # rows with the same count or budget, in the order of their windows
    labels: dict[
        tuple[float, float], str
    ] = {}  # at each place, the window, and the counts of the rows that are there
    for row in points:
        assert row.asked is not None
        count, budget = row.asked.kernel_count, row.asked.budget
        name = (
            f"{count} elements"
            if count
            else f"budget {DEFAULT_BUDGET if budget is None else budget:g} %"
        )
        series.setdefault(name, []).append(row)
        place, counts = (cost(row), gain(row)), span(row.kernel_counts)
        labels[place] = (
            f"{labels[place]}, {counts}" if place in labels else f"{row.window}: {counts}"
        )
    for (name, members), marker in zip(series.items(), itertools.cycle(MARKERS)):
        (line,) = axes.plot(
            [*map(cost, members)], [*map(gain, members)], "-", linewidth=1, zorder=1
        )
        look: dict[str, Any] = {"marker": marker, "color": line.get_color(), "linestyle": "none"}
        for row in members:
            axes.plot(cost(row), gain(row), fillstyle="none" if row.dominated else "full", **look)
        axes.plot([], [], label=name, **look)
    if sweep.choice.row is not None:
        taken = sweep.rows[sweep.choice.row]
        axes.plot(
            cost(taken), gain(taken), "ks", fillstyle="none", markersize=12, label="recommended"
        )
    if any(row.dominated for row in points):
        axes.plot([], [], "o", color="0.4", fillstyle="none", label="dominated")
    for place, text in labels.items():
        axes.annotate(text, place, xytext=(8, -11), textcoords="offset points", fontsize=8)
    if (original := cost(sweep.rows[0])) is not None:
        axes.axvline(original, color="0.5", linestyle=":", label="dense original")
    axes.margins(x=0.18, y=0.12)
    if gain is _window:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if x_label == MACS:
        axes.xaxis.set_major_formatter(EngFormatter())
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    axes.set(xlabel=x_label, ylabel=y_label, title=printable(sweep.model))
    return figure


def _window(row: SweepRow) -> int:
    return max(max(size) for size in row.dilated_sizes)


def _axes(sweep: Sweep) -> tuple[tuple[Value, str], tuple[Value, str]]:
    """What to draw, and its name, along each axis."""
    done = [row for row in sweep.rows if row.status == "done"]
    x: tuple[Value, str] = (
        (step_ms, "training step, ms")
        if all(row.step_ms for row in done)
        else (attrgetter("macs"), MACS)
    )
    if all(row.images for row in done):
        return x, (attrgetter("output_error"), "relative error of outputs")
    if all(row.kernel_error is not None for row in done):
        return x, (attrgetter("kernel_error"), "relative error of kernels")
    return x, (_window, "window, cells")
