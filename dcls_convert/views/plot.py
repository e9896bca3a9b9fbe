"""The pictures as static files for a paper, drawn by matplotlib (extra `plot`), which is imported when it is used."""

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import DclsConvertError, printable, shown
from ..layers.interpolation import position_limits
from ..options import FigureName
from .pictures import Pictures
from .stages import stage_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCH = 2.4  # side of a panel
DOTS_PER_INCH = 120
MOST_PANELS = 12  # of positions or layers; those with the most elements, or the first
MOST_COLUMNS = 6
KERNELS = 8  # of a layer
STYLES = ("-", "--", "-.", ":")  # of lines
UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
HASH_SALT = "dcls-convert"  # without one, the names inside an SVG are random
OLD = {"edgecolor": "C1", "facecolor": "none", "linestyle": "--", "linewidth": 1.2}


def draw(pictures: Pictures, figure: FigureName, suffix: str) -> bytes:
    """A figure as a file, in the format of the suffix; DclsConvertError says why there is nothing to draw."""
    with warnings.catch_warnings(action="ignore"):  # characters that the font lacks
        file, drawn = io.BytesIO(), FIGURES[figure](pictures)
        save(drawn, file, suffix, dpi=DOTS_PER_INCH, bbox_inches="tight")
    return file.getvalue()


def save(figure: "Figure", file: Path | IO[bytes], suffix: str, **how: Any) -> None:
    """Write a figure, as savefig takes it, as a file that is the same on every day and in every process."""
    import matplotlib

    suffix = suffix.lower()
    with matplotlib.rc_context({"svg.hashsalt": HASH_SALT}):
        figure.savefig(file, format=suffix[1:], metadata=UNDATED.get(suffix), **how)


def _figure(height: float, width: float) -> "Figure":
    """An empty one, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _panels(rows: int, columns: int, *, inches: tuple[float, float] = (INCH, INCH)) -> tuple["Figure", Any]:
    figure = _figure(rows * inches[0], columns * inches[1])
    return figure, figure.subplots(rows, columns, squeeze=False)


def _positions(pictures: Pictures) -> "Figure":
    """A heat map of each positions tensor, and below it the histograms along its axes."""
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    chosen = pictures.positions[:MOST_PANELS]
    columns = min(len(chosen), MOST_COLUMNS)
    figure, axes = _panels(2 * -(-len(chosen) // columns), columns)
    for panel in axes.flat:
        panel.set_axis_off()
    for index, picture in enumerate(chosen):
        row, column = divmod(index, columns)
        heat, histograms = axes[2 * row : 2 * row + 2, column]
        for panel in (heat, histograms):
            panel.set_axis_on()
            panel.tick_params(labelsize=7)
        extent = left, right, bottom, top = _extent((1, *picture.size))
        heat.imshow(picture.heat, extent=extent, cmap="Blues", norm=PowerNorm(0.5, vmin=0))
        for old in picture.extents:
            high, wide = (1, *old)[-2:]
            corner = ((left + right - wide) / 2, (top + bottom - high) / 2)
            heat.add_patch(Rectangle(corner, wide, high, **OLD))  # type: ignore[arg-type]
        heat.set_title(shown(picture.row.name, 34), fontsize=8, parse_math=False)
        for name, counts, side in zip(picture.axes, picture.histograms, picture.size, strict=True):
            low = position_limits(side)[0] - 0.5
            edges = [low + place / picture.bins_per_cell for place in range(len(counts) + 1)]
            histograms.stairs(counts, edges, label=name, linestyle="-" if name == picture.axes[-1] else "--")
        histograms.set_xlabel("cells from the centre", fontsize=7)
        histograms.set_ylabel("elements in a bin", fontsize=7)
        histograms.legend(fontsize=6, frameon=False)
    _say_part(figure, pictures)
    return figure


def _say_part(figure: "Figure", pictures: Pictures) -> None:
    if (total := len(pictures.positions)) > MOST_PANELS:
        figure.supxlabel(f"the first {MOST_PANELS} of {total} positions tensors", fontsize=8)


def _extent(size: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of a window, of its rows and columns, in cells from the centre."""
    (top, bottom), (left, right) = (position_limits(side) for side in size[-2:])
    return left - 0.5, right + 0.5, bottom + 0.5, top - 0.5


def _kernels(pictures: Pictures) -> "Figure":
    """The first layer of each positions tensor: its kernels with the most energy.

    Elements are dots; filled ones are positive.
    """
    first = [picture.row.layers[0] for picture in pictures.positions][:MOST_PANELS]
    layers = {layer.name: layer for layer in pictures.kernels}
    figure = _figure(1.3 * len(first), 1.15 * KERNELS)
    for part, name in zip(figure.subfigures(len(first), 1, squeeze=False)[:, 0], first, strict=True):
        layer = layers[name]
        some = f"{min(KERNELS, layer.total)} of {layer.total:,} kernels, most energy first"
        part.suptitle(f"{shown(name, 40)}: {some}", fontsize=7, x=0.01, ha="left", parse_math=False)
        panels = part.subplots(1, KERNELS)
        for index, panel in enumerate(panels):
            panel.set(xticks=[], yticks=[], frame_on=index < layer.total)
        for panel, cells, places, weights in zip(panels, layer.cells, layer.positions, layer.weights, strict=False):
            most = float(cells.abs().max()) or 1.0
            panel.imshow(cells, extent=_extent(tuple(cells.shape)), cmap="RdBu", vmin=-most, vmax=most)
            faces = ["black" if weight > 0 else "none" for weight in weights]
            panel.scatter(places[:, 1], places[:, 0], s=3, c=faces, edgecolors="black", linewidths=0.4)
    _say_part(figure, pictures)
    return figure


def _fields(pictures: Pictures) -> "Figure":
    """The effective receptive fields on one logarithmic scale."""
    seen = pictures.fields
    if seen is None or not seen.fields:
        reasons = [str(pictures.raw_weights)] if seen is None else seen.notes
        raise DclsConvertError(f"there is no effective receptive field to draw: {'; '.join(reasons)}")
    figure, axes = _panels(1, len(seen.fields), inches=(3.6, 3.2))
    for panel, field in zip(axes.flat, seen.fields, strict=True):
        extent = (0, field.size[1], field.size[0], 0)
        drawn = panel.imshow(field.logs, interpolation="nearest", vmin=-seen.decades, vmax=0, extent=extent)
        panel.set_title(_wrapped(f"{field.title}: {field.what}"), fontsize=8, parse_math=False)
        panel.set_xlabel(_wrapped(field.sentence), fontsize=7)
        panel.tick_params(labelsize=7)
    bar = figure.colorbar(drawn, ax=list(axes.flat), shrink=0.8)
    bar.set_label("log10 of mean |gradient|, largest = 0", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def _wrapped(text: str, width: int = 46) -> str:
    return "\n".join(textwrap.wrap(printable(text), width))


def _cost(pictures: Pictures) -> "Figure":
    """Parameters and MACs of the replaced convolutions, by stage."""
    from matplotlib.ticker import EngFormatter

    rows = stage_rows(pictures.report.layers)[::-1]
    charts = {"parameters": [row.params for row in rows], "MACs for one image": [row.macs for row in rows]}
    charts = {name: changes for name, changes in charts.items() if all(one.delta is not None for one in changes)}
    figure, axes = _panels(1, len(charts), inches=(0.8 + 0.5 * len(rows), 4.0))
    for panel, (name, changes) in zip(axes.flat, charts.items(), strict=True):
        for when, shift, hatch in (("before", 0.2, "////"), ("after", -0.2, "")):
            places, counts = [index + shift for index in range(len(rows))], [getattr(one, when) for one in changes]
            panel.barh(places, counts, 0.36, label=when, hatch=hatch, color="C0", alpha=0.55 if hatch else 1)
        panel.set_yticks(range(len(rows)), [shown(row.name, 24) for row in rows], fontsize=7)
        for tick in panel.get_yticklabels():
            tick.set_parse_math(False)
        panel.set_title(f"{name}, replaced convolutions", fontsize=8)
        panel.xaxis.set_major_formatter(EngFormatter())
        panel.tick_params(axis="x", labelsize=7)
        panel.legend(fontsize=7, frameon=False)
    return figure


def _history(pictures: Pictures) -> "Figure":
    """Speed, spread and share at the border over time."""
    history = pictures.history
    if history is None:
        raise DclsConvertError("--figure history needs --history positions.jsonl")
    figure, axes = _panels(1, 3, inches=(2.6, 3.2))
    labels = {"speed": "speed (cells per step)", "spread": "spread (cells)", "border": "share at the border"}
    for panel, (name, label) in zip(axes.flat, labels.items(), strict=True):
        for track, style in zip(history.tracks, itertools.cycle(STYLES), strict=False):
            values = [math.nan if value is None else value for value in getattr(track, name)]
            panel.plot(history.steps, values, style, label=shown(track.name, 30), linewidth=1.2)
        panel.set_ylabel(label, fontsize=8)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
    for text in axes[0, 0].legend(fontsize=6, frameon=False).get_texts():
        text.set_parse_math(False)
    return figure


FIGURES: dict[FigureName, Callable[[Pictures], "Figure"]] = {
    "positions": _positions,
    "kernels": _kernels,
    "receptive-field": _fields,
    "cost": _cost,
    "history": _history,
}
