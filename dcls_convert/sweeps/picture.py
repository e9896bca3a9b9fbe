"""The picture of a sweep: what each row costs and gains, labelled with its window and number of elements."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import printable
from ..tables import span
from .rows import Sweep, SweepRow

_Value = Callable[[SweepRow], Any]


def draw(sweep: Sweep, path: Path) -> None:
    """Write the picture; its suffix says the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    (cost, x_label), (gain, y_label) = _axes(sweep)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes: Any = figure.add_subplot()
    points = [row for row in sweep.rows if row.status == "done" and cost(row) is not None]
    taken = None if sweep.choice.row is None else sweep.rows[sweep.choice.row]
    front = sorted((cost(row), gain(row)) for row in points if not row.dominated)
    axes.plot([x for x, _ in front], [y for _, y in front], "o-", color="C0", markersize=4, label="front")
    for label, marker, members in [
        ("dominated", "o", [row for row in points if row.dominated]),
        ("the row to take", "s", [row for row in points if row is taken]),
    ]:
        at = [cost(row) for row in members], [gain(row) for row in members]
        axes.plot(*at, marker, color="0.4" if marker == "o" else "C2", fillstyle="none", markersize=9, label=label)
    for (x, y), text in _labels(points, cost, gain).items():
        axes.annotate(text, (x, y), xytext=(7, -11), textcoords="offset points", fontsize=8)
    if (original := cost(sweep.rows[0])) is not None:
        axes.axvline(original, color="0.5", linestyle=":", label="dense original")
    axes.margins(0.12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=gain is _window))
    axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel=x_label, ylabel=y_label, title=printable(sweep.model))
    figure.savefig(path, dpi=150)


def _labels(points: Sequence[SweepRow], cost: _Value, gain: _Value) -> dict[tuple[float, float], str]:
    """At each place, the window, and the counts of the rows that are there."""
    counts: dict[tuple[float, float], list[str]] = {}
    for row in points:
        counts.setdefault((cost(row), gain(row)), []).append(f"{row.window}: {span(row.kernel_counts)}")
    return {at: ", ".join([texts[0], *(text.partition(": ")[2] for text in texts[1:])]) for at, texts in counts.items()}


def _window(row: SweepRow) -> int:
    return max(max(size) for size in row.dilated_sizes)


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
    return x, (_window, "window, cells")
