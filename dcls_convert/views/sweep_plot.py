"""The picture of a sweep: what each row costs and gains, labelled with its window and number of elements."""

import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..compare.sweep import Sweep, SweepRow, step_ms
from ..errors import printable
from ..options import DEFAULT_BUDGET
from ..tables import span
from .plot import new_figure, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "o^Dvs*"
MACS = "MACs"
STYLE = {"figure.dpi": 150, "legend.fontsize": 8, "legend.framealpha": 1, "legend.edgecolor": "none"}


def draw_sweep(sweep: Sweep, suffix: str) -> bytes:
    """The picture as a file, in the format of the suffix. The points of dominated rows are hollow."""
    return saved(lambda: _figure(sweep), suffix, **STYLE)


def _figure(sweep: Sweep) -> "Figure":
    from matplotlib.ticker import EngFormatter, MaxNLocator

    (cost, x_label), (gain, y_label) = _axes(sweep)
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    points = [row for row in sweep.rows if row.status == "done" and cost(row) is not None]
    series: dict[str, list[SweepRow]] = {}  # rows with the same count or budget, in the order of their windows
    labels: dict[tuple[float, float], str] = {}  # at each place, the window, and the counts of the rows that are there
    for row in points:
        assert row.asked is not None
        count, budget = row.asked.kernel_count, row.asked.budget
        name = f"{count} elements" if count else f"budget {DEFAULT_BUDGET if budget is None else budget:g} %"
        series.setdefault(name, []).append(row)
        place, counts = (cost(row), gain(row)), span(row.kernel_counts)
        labels[place] = f"{labels[place]}, {counts}" if place in labels else f"{row.window}: {counts}"
    for (name, members), marker in zip(series.items(), itertools.cycle(MARKERS)):
        (line,) = axes.plot([*map(cost, members)], [*map(gain, members)], "-", linewidth=1, zorder=1)
        look: dict[str, Any] = {"marker": marker, "color": line.get_color(), "linestyle": "none"}
        for row in members:
            axes.plot(cost(row), gain(row), fillstyle="none" if row.dominated else "full", **look)
        axes.plot([], [], label=name, **look)
    if sweep.choice.row is not None:
        taken = sweep.rows[sweep.choice.row]
        axes.plot(cost(taken), gain(taken), "ks", fillstyle="none", markersize=12, label="the row to take")
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


_Value = Callable[[SweepRow], Any]


def _window(row: SweepRow) -> int:
    return max(max(size) for size in row.dilated_sizes)


def _axes(sweep: Sweep) -> tuple[tuple[_Value, str], tuple[_Value, str]]:
    """What to draw, and its name, along each axis."""
    done = [row for row in sweep.rows if row.status == "done"]
    x: tuple[_Value, str] = (
        (step_ms, "training step, ms") if all(row.step_ms for row in done) else (attrgetter("macs"), MACS)
    )
    if all(row.images for row in done):
        return x, (attrgetter("output_error"), "relative error of outputs")
    if all(row.kernel_error is not None for row in done):
        return x, (attrgetter("kernel_error"), "relative error of kernels")
    return x, (_window, "window, cells")
