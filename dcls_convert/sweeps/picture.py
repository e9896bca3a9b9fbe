"""The picture of a sweep: what each row costs, and what it gains, with the front drawn as a line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..reports.report_view import span
from .rows import Sweep, SweepRow

_Value = Callable[[SweepRow], Any]


def draw(sweep: Sweep, path: Path) -> None:
    """Write the picture; its suffix says the format. Hollow points are dominated, the square is the row to take."""
    from matplotlib.figure import Figure

    (cost, x_label), (gain, y_label) = _axes(sweep)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    points = [(row, index == sweep.choice.row) for index, row in enumerate(sweep.rows) if row.status == "done"]
    points = [(row, taken) for row, taken in points if cost(row) is not None]
    front = sorted((cost(row), gain(row)) for row, _ in points if not row.dominated)
    axes.plot([x for x, _ in front], [y for _, y in front], color="0.8", zorder=1)
    labels: dict[tuple[float, float], list[str]] = {}
    for row, taken in points:
        at = cost(row), gain(row)
        colour = "0.6" if row.dominated else "C2" if taken else "C0"
        fill = "none" if row.dominated else colour
        axes.plot(*at, "s" if taken else "o", color=colour, markerfacecolor=fill, markersize=9 if taken else 6)
        labels.setdefault(at, []).append(span(row.kernel_counts))
        labels[at][0] = f"{row.window}: {labels[at][0]}" if len(labels[at]) == 1 else labels[at][0]
    for at, texts in labels.items():
        axes.annotate(", ".join(texts), at, xytext=(6, -10), textcoords="offset points", fontsize=8)
    if (original := cost(sweep.rows[0])) is not None:
        axes.axvline(original, color="0.5", linestyle=":", label="dense original")
        axes.legend(loc="best", frameon=False)
    axes.set(xlabel=x_label, ylabel=y_label, title=sweep.model)
    figure.savefig(path, dpi=150)


def _axes(sweep: Sweep) -> tuple[tuple[_Value, str], tuple[_Value, str]]:
    """What to draw, and its name, along each axis."""
    done = [row for row in sweep.rows if row.status == "done"]
    x: tuple[_Value, str] = (lambda row: row.macs and row.macs / 1e9, "MACs, G")
    if all(row.step_ms for row in done):
        x = (lambda row: row.step_ms and row.step_ms.median, "training step, ms")
    if all(row.images for row in done):
        return x, (lambda row: row.output_error, "relative error of outputs")
    if all(row.kernel_error is not None for row in done):
        return x, (lambda row: row.kernel_error, "relative error of kernels")
    return x, (lambda row: max(max(size) for size in row.dilated_sizes), "window, cells (number: elements)")
