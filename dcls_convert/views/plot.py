"""The pictures as static files for a paper, drawn by matplotlib (extra `plot`), which is imported when it is used."""

import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DclsConvertError, printable, shown
from ..layers.interpolation import position_limits
from ..options import FigureName
from .kernels import KernelPicture
from .page import field_sentence
from .pictures import Pictures
from .positions import PositionPicture
from .receptive_field import decades
from .saving import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCH = 2.4  # side of a panel
DOTS_PER_INCH = 120
MOST_PANELS = 12  # of positions or layers; those with the most elements, or the first
MOST_COLUMNS = 6
KERNELS = 8  # of a layer
OLD = {"edgecolor": "C1", "facecolor": "none", "linestyle": "--", "linewidth": 1.2}


def draw(pictures: Pictures, figure: FigureName, suffix: str) -> bytes:
    """One of `FIGURES` as a file, in the format of the suffix: ".png", ".svg" or ".pdf".

    Raises:
        DclsConvertError: There is nothing to draw; says why.
    """
    with warnings.catch_warnings(action="ignore"):  # characters that the font lacks
        file, drawn = io.BytesIO(), FIGURES[figure](pictures)
        save(drawn, file, suffix, dpi=DOTS_PER_INCH, bbox_inches="tight")
    return file.getvalue()


def _empty(height: float, width: float) -> "Figure":
    """In inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _figure(rows: int, columns: int, *, inches: tuple[float, float] = (INCH, INCH)) -> tuple["Figure", Any]:
    figure = _empty(rows * inches[0], columns * inches[1])
    return figure, figure.subplots(rows, columns, squeeze=False)


def _title(axes: "Axes", name: str) -> None:
    axes.set_title(shown(name, 34), fontsize=8, parse_math=False)


def _positions(pictures: Pictures) -> "Figure":
    """A heat map of each positions tensor, and below it the histograms along its axes."""
    chosen = pictures.positions[:MOST_PANELS]
    columns = min(len(chosen), MOST_COLUMNS)
    rows = -(-len(chosen) // columns)
    figure, axes = _figure(2 * rows, columns)
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        if index < len(chosen):
            _heat(axes[2 * row, column], chosen[index])
            _histograms(axes[2 * row + 1, column], chosen[index])
        else:
            axes[2 * row, column].set_axis_off()
            axes[2 * row + 1, column].set_axis_off()
    _say_part(figure, pictures)
    return figure


def _say_part(figure: "Figure", pictures: Pictures) -> None:
    if (total := len(pictures.positions)) > MOST_PANELS:
        figure.supxlabel(f"the first {MOST_PANELS} of {total} positions tensors", fontsize=8)


def _histograms(axes: "Axes", picture: PositionPicture) -> None:
    for name, counts, side in zip(picture.axes, picture.histograms, picture.size, strict=True):
        low = position_limits(side)[0] - 0.5
        edges = [low + index / picture.bins_per_cell for index in range(len(counts) + 1)]
        axes.stairs(counts, edges, label=name, linestyle="-" if name == picture.axes[-1] else "--")
    axes.set_xlabel("cells from the centre", fontsize=7)
    axes.set_ylabel("elements in a bin", fontsize=7)
    axes.legend(fontsize=6, frameon=False)
    axes.tick_params(labelsize=7)


def _heat(axes: "Axes", picture: PositionPicture) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    axes.imshow(picture.heat, extent=_extent(picture.heat_size), cmap="Blues", norm=PowerNorm(0.5, vmin=0))
    for old in picture.extents:
        rows, columns = (1, *old)[-2:]
        corner = (_start(picture.heat_size[1], columns), _start(picture.heat_size[0], rows))
        axes.add_patch(Rectangle(corner, columns, rows, **OLD))  # type: ignore[arg-type]
    _title(axes, picture.row.name)
    axes.tick_params(labelsize=7)


def _extent(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of a window of (rows, columns), in cells from the centre."""
    (top, bottom), (left, right) = (position_limits(side) for side in size)
    return left - 0.5, right + 0.5, bottom + 0.5, top - 0.5


def _start(side: int, old: int) -> float:
    """Where the old kernel's extent begins in a window of `side` cells."""
    return position_limits(side)[0] - 0.5 + (side - old) / 2


def _kernels(pictures: Pictures) -> "Figure":
    """The first layer of each positions tensor: its kernels with the most energy, with their elements."""
    first = [picture.row.layers[0] for picture in pictures.positions][:MOST_PANELS]
    layers = {layer.name: layer for layer in pictures.kernels}
    figure = _empty(1.3 * len(first), 1.15 * KERNELS)
    for part, name in zip(figure.subfigures(len(first), 1, squeeze=False)[:, 0], first, strict=True):
        layer = layers[name]
        some = f"{min(KERNELS, layer.total)} of {layer.total:,} kernels, most energy first"
        part.suptitle(f"{shown(name, 40)}: {some}", fontsize=7, x=0.01, ha="left", parse_math=False)
        for index, panel in enumerate(part.subplots(1, KERNELS)):
            panel.set(xticks=[], yticks=[], frame_on=index < layer.total)
            if index < layer.total:
                _kernel(panel, layer.kernels[index])
    _say_part(figure, pictures)
    return figure


def _kernel(axes: "Axes", kernel: KernelPicture) -> None:
    """The cells, and the elements as dots: filled ones are positive."""
    most = max(abs(cell) for row in kernel.cells for cell in row) or 1.0
    size = (len(kernel.cells), len(kernel.cells[0]))
    axes.imshow(kernel.cells, extent=_extent(size), cmap="RdBu", vmin=-most, vmax=most)
    rows, columns, weights = zip(*kernel.elements, strict=True)
    faces = ["black" if weight > 0 else "none" for weight in weights]
    axes.scatter(columns, rows, s=3, c=faces, edgecolors="black", linewidths=0.4)


def _fields(pictures: Pictures) -> "Figure":
    """The effective receptive fields on one logarithmic scale."""
    found = pictures.fields
    if found is None or not found.fields:
        reasons = [pictures.raw_weights] if found is None else list(found.notes)
        raise DclsConvertError(f"there is no effective receptive field to draw: {'; '.join(map(str, reasons))}")
    figure, axes = _figure(1, len(found.fields), inches=(3.6, 3.2))
    for panel, field in zip(axes.flat, found.fields, strict=True):
        shown_field = panel.imshow(
            field.logs,
            interpolation="nearest",
            vmin=-decades(found.fields),
            vmax=0,
            extent=(0, field.size[1], field.size[0], 0),
        )
        panel.set_title(_wrapped(f"{field.title}: {field.what}"), fontsize=8, parse_math=False)
        panel.set_xlabel(_wrapped(field_sentence(field)), fontsize=7)
        panel.tick_params(labelsize=7)
    bar = figure.colorbar(shown_field, ax=list(axes.flat), shrink=0.8)
    bar.set_label("log10 of mean |gradient|, largest = 0", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure


def _wrapped(text: str, width: int = 46) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(printable(text), width))


def _cost(pictures: Pictures) -> "Figure":
    """Parameters and MACs of the replaced convolutions, by stage."""
    from matplotlib.ticker import EngFormatter

    costs, units = pictures.costs, [("parameters", "params"), ("MACs for one image", "macs")]
    known = [unit for unit in units if all(getattr(cost, unit[1]).before is not None for cost in costs)]
    figure, axes = _figure(1, len(known), inches=(0.8 + 0.5 * len(costs), 4.0))
    for panel, (name, unit) in zip(axes.flat, known, strict=True):
        for when, shift, hatch in (("before", 0.2, "////"), ("after", -0.2, "")):
            counts = [getattr(getattr(cost, unit), when) for cost in reversed(costs)]
            places = [index + shift for index in range(len(costs))]
            panel.barh(places, counts, 0.36, label=when, hatch=hatch, color="C0", alpha=0.55 if hatch else 1)
        panel.set_yticks(range(len(costs)), [shown(cost.stage, 24) for cost in reversed(costs)], fontsize=7)
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
    figure, axes = _figure(1, 3, inches=(2.6, 3.2))
    for panel, (label, name) in zip(
        axes.flat,
        (("speed (cells per step)", "speed"), ("spread (cells)", "spread"), ("share at the border", "border")),
        strict=True,
    ):
        for index, track in enumerate(history.tracks):
            style: Sequence[str] = ("-", "--", "-.", ":")
            line = panel.plot(history.steps, [float("nan") if v is None else v for v in getattr(track, name)])[0]
            line.set(linestyle=style[index % len(style)], label=shown(track.name, 30), linewidth=1.2)
        panel.set_ylabel(label, fontsize=8)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=7)
    legend = axes[0, 0].legend(fontsize=6, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


FIGURES: dict[FigureName, Callable[[Pictures], "Figure"]] = {
    "positions": _positions,
    "kernels": _kernels,
    "receptive-field": _fields,
    "cost": _cost,
    "history": _history,
}
