"""Static figures for papers, drawn by matplotlib (extra `plot`), which is imported late."""

import io
import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ..checkpoints.folder import PAGE, PICTURE
from ..errors import DclsConvertError
from ..geometry import position_limits
from ..options import FigureName
from ..planning.plan import ConversionPlan
from ..text import shortened
from .elements import PositionPicture
from .history import CURVE_LABELS
from .page import page
from .pictures import Pictures, pictures_of_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 2.4  # side of a panel
MAX_PANELS = 12  # positions tensors or layers in a figure; the first of the plan are drawn
PANELS_PER_ROW = 6
KERNELS_PER_LAYER = 8
LINE_STYLES = ("-", "--", "-.", ":")
FIGURE_STYLE = {
    "figure.dpi": 120,
    "font.size": 7,
    "legend.frameon": False,
    "text.parse_math": False,
}
# Metadata, by suffix, that removes the date from the file.
NO_DATE: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
HASH_SALT = "dcls-convert"  # without a salt, the names inside an SVG are random


def draw(pictures: Pictures, figure: FigureName, suffix: str) -> bytes:
    """Return a figure as a file, in the format of the suffix.

    Raises:
        DclsConvertError: There is nothing to draw; the message says why.
    """
    return figure_file(lambda: FIGURES[figure](pictures), suffix, **FIGURE_STYLE)


def figure_file(make_figure: Callable[[], "Figure"], suffix: str, **style: Any) -> bytes:
    """Return a figure as a file without a date, drawn with these settings of matplotlib."""
    import matplotlib

    file = io.BytesIO()
    settings = cast(Any, {"svg.hashsalt": HASH_SALT} | style)
    # matplotlib warns about characters that are missing in the font.
    with warnings.catch_warnings(action="ignore"), matplotlib.rc_context(settings):
        metadata = NO_DATE.get(suffix.lower())
        make_figure().savefig(
            file, format=suffix[1:].lower(), metadata=metadata, bbox_inches="tight"
        )
    return file.getvalue()


def picture_files(model: nn.Module, plan: ConversionPlan, folder: str | Path) -> dict[str, bytes]:
    """Return the page and a figure of the positions, for `save_converted(pictures=...)`."""
    pictures = pictures_of_model(model, plan, Path(folder))
    return {PAGE: page(pictures).encode(), PICTURE: draw(pictures, "positions", ".png")}


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _positions_figure(pictures: Pictures) -> "Figure":
    """Draw a heat map of each positions tensor, and below it the histograms along its axes."""
    drawn = pictures.positions[:MAX_PANELS]
    columns = min(len(drawn), PANELS_PER_ROW)
    rows = math.ceil(len(drawn) / columns)
    figure = new_figure(columns * PANEL_INCHES, 2 * rows * PANEL_INCHES)
    panels = figure.subfigures(rows, columns, squeeze=False)
    for picture, panel in zip(drawn, panels.flat, strict=False):
        heat, histograms = panel.subplots(2)
        _draw_heat(heat, picture)
        _draw_histograms(histograms, picture)
    _add_legend(figure, pictures, "dashed: the old kernel; darker: more elements")
    return figure


def _draw_heat(axes: "Axes", picture: PositionPicture) -> None:
    """Draw a heat map, with the old kernels as dashed rectangles in its middle."""
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    limits = _axes_limits((1, *picture.size))
    left, right, bottom, top = limits
    axes.imshow(picture.heat, extent=limits, cmap="Blues", norm=PowerNorm(0.5, vmin=0))
    for old_size in picture.old_kernel_sizes:
        height, width = (1, *old_size)[-2:]
        corner = ((left + right - width) / 2, (top + bottom - height) / 2)
        dashed: dict[str, Any] = {"edgecolor": "C1", "fill": False, "linestyle": "--"}
        axes.add_patch(Rectangle(corner, width, height, **dashed))
    axes.set_title(shortened(picture.row.name, 34))


def _draw_histograms(axes: "Axes", picture: PositionPicture) -> None:
    """Draw the histogram of elements along each axis; only the last axis has a solid line."""
    for name, counts, side in zip(picture.axes, picture.histograms, picture.size, strict=True):
        low = position_limits(side)[0] - 0.5
        edges = [low + index / picture.bins_per_cell for index in range(len(counts) + 1)]
        linestyle = "-" if name == picture.axes[-1] else "--"
        axes.stairs(counts, edges, label=name, linestyle=linestyle)
    axes.set(xlabel="cells from the centre", ylabel="elements in a bin")
    axes.legend()


def _add_legend(figure: "Figure", pictures: Pictures, legend: str) -> None:
    """Write a legend below the panels; say how many positions tensors are drawn, if not all."""
    total = len(pictures.positions)
    if total > MAX_PANELS:
        legend += f"; the first {MAX_PANELS} of {total} positions tensors"
    figure.supxlabel(legend, fontsize="small")


def _axes_limits(size: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a window (..., rows, columns).

    They are in cells from the centre.
    """
    top, bottom = position_limits(size[-2])
    left, right = position_limits(size[-1])
    return left - 0.5, right + 0.5, bottom + 0.5, top - 0.5


def _kernels_figure(pictures: Pictures) -> "Figure":
    """Draw kernels of the first layer of each positions tensor.

    Elements are dots, which are filled if their weight is positive.
    """
    names = [picture.row.layers[0] for picture in pictures.positions][:MAX_PANELS]
    layers = {layer.name: layer for layer in pictures.kernels}
    figure = new_figure(1.15 * KERNELS_PER_LAYER, 1.3 * len(names))
    rows = figure.subfigures(len(names), 1, squeeze=False)
    for row, name in zip(rows.flat, names, strict=True):
        layer = layers[name]
        count_text = f"{min(KERNELS_PER_LAYER, layer.total)} of {layer.total:,} kernels"
        row.suptitle(f"{shortened(name, 40)}: {count_text}, most energy first", x=0.01, ha="left")
        panels = row.subplots(1, KERNELS_PER_LAYER)
        for index, panel in enumerate(panels):
            panel.set(xticks=[], yticks=[], frame_on=index < layer.total)
        drawn_kernels = zip(panels, layer.cells, layer.positions, layer.weights, strict=False)
        for panel, cells, positions, weights in drawn_kernels:
            _draw_kernel(panel, cells, positions, weights)
    scale = "blue cells are positive, red ones negative, each kernel on its own scale"
    _add_legend(figure, pictures, f"{scale}; dots are elements, filled where positive")
    return figure


def _draw_kernel(axes: "Axes", cells: Tensor, positions: Tensor, weights: Tensor) -> None:
    """Draw a kernel's cells (rows, columns), with dots at its elements' positions (E, 2)."""
    largest = float(cells.abs().max()) or 1.0
    limits = _axes_limits(tuple(cells.shape))
    axes.imshow(cells, extent=limits, cmap="RdBu", vmin=-largest, vmax=largest)
    faces = ["black" if weight > 0 else "none" for weight in weights]
    dots: dict[str, Any] = {"s": 3, "c": faces, "edgecolors": "black", "linewidths": 0.4}
    axes.scatter(positions[:, 1], positions[:, 0], **dots)


def _history_figure(pictures: Pictures) -> "Figure":
    """Draw speed, spread and border share of each positions tensor over the steps."""
    history = pictures.history
    if history is None:
        raise DclsConvertError("the figure history needs a record of positions, positions.jsonl")
    figure = new_figure(3.2 * len(CURVE_LABELS), 2.6)
    axes = figure.subplots(1, len(CURVE_LABELS))
    for panel, (curve, label) in zip(axes, CURVE_LABELS.items(), strict=True):
        for track, style in zip(history.tracks, itertools.cycle(LINE_STYLES), strict=False):
            heights = [math.nan if value is None else value for value in getattr(track, curve)]
            name = shortened(track.name, 30)
            # With points, since no line leads to a known value between unknown ones.
            panel.plot(history.steps, heights, style, marker=".", label=name, linewidth=1.2)
        panel.set(xlabel="step", ylabel=label)
        panel.locator_params(axis="x", integer=True, min_n_ticks=1)
        panel.update_datalim([(history.steps[0], 0)])  # so that the margin above is one of 0 to top
        panel.set_ylim(bottom=0)
    axes[0].legend()
    return figure


FIGURES: dict[FigureName, Callable[[Pictures], "Figure"]] = {
    "positions": _positions_figure,
    "kernels": _kernels_figure,
    "history": _history_figure,
}
