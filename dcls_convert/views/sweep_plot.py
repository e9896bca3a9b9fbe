"""The picture of a sweep: what each row costs and gains, labelled with its window and number of elements."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..compare.sweep import Sweep, SweepRow
from ..errors import printable
from ..options import DEFAULT_BUDGET
from ..tables import span
from .plot import save

_Value = Callable[[SweepRow], Any]
MARKERS = "o^Dvs*"
MACS = "MACs"
DOTS_PER_INCH = 150


def draw(sweep: Sweep, path: Path) -> None:
    """Write the picture; its suffix says the format. The points of dominated rows are hollow."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    (cost, x_label), (gain, y_label) = _axes(sweep)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
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
        line = axes.plot([*map(cost, members)], [*map(gain, members)], "-", linewidth=1, zorder=1)[0]
        look = {"marker": marker, "color": line.get_color(), "linestyle": "none"}
        for row in members:
            axes.plot(cost(row), gain(row), fillstyle="none" if row.dominated else "full", **look)
        axes.plot([], [], label=name, **look)
    if sweep.choice.row is not None:
        at = [[value(sweep.rows[sweep.choice.row])] for value in (cost, gain)]
        axes.plot(*at, "ks", fillstyle="none", markersize=12, linestyle="none", label="the row to take")
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
        axes.legend(fontsize=8, framealpha=1, edgecolor="none")
    axes.set(xlabel=x_label, ylabel=y_label, title=printable(sweep.model))
    save(figure, path, path.suffix, dpi=DOTS_PER_INCH)


def _window(row: SweepRow) -> int:
    return max(max(size) for size in row.dilated_sizes)


def _axes(sweep: Sweep) -> tuple[tuple[_Value, str], tuple[_Value, str]]:
    """What to draw, and its name, along each axis."""
    done = [row for row in sweep.rows if row.status == "done"]
    x: tuple[_Value, str] = (lambda row: row.macs, MACS)
    if all(row.step_ms for row in done):
        x = (lambda row: row.step_ms and row.step_ms.median, "training step, ms")
    if all(row.images for row in done):
        return x, (lambda row: row.output_error, "relative error of outputs")
    if all(row.kernel_error is not None for row in done):
        return x, (lambda row: row.kernel_error, "relative error of kernels")
    return x, (_window, "window, cells")
