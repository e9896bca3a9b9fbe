"""The figure of a folder, drawn by matplotlib (extra `plot`), which is imported late.

Each row shows one positions tensor: where its elements are, and kernels of its first layer with
their elements. Below, `curves` show how the elements moved, if there are records of trainings.

Axes: A learnt axes, O output channels, I input channels per group, N drawn kernels, E elements.
"""

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry import Pair, learnt_axes, position_limits, size_text
from ..layers.construction import construct_kernel
from ..options import PICTURE_WIDTH
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..text import count_text, shortened
from .curves import Curves
from .history import Training
from .layout import (
    CHARACTERS_PER_INCH,
    FONT_SIZE,
    LINE,
    MARGIN,
    SMALL_FONT_SIZE,
    add_axes,
    add_text,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Lengths in a row of the figure, in inches.
TITLES = 0.33  # above panels: the titles of the row and of the panels
TICKS = 0.24  # numbers below a heat map, and space to the next row
LEFT = 0.24  # numbers beside a heat map
GAP = 0.06  # between panels, and before colour bars
BAR = 0.05  # width of a colour bar
BESIDE_COUNTS = 0.24  # numbers beside the colour bar of a heat map
BESIDE_WEIGHTS = 0.45  # numbers beside the colour bar of kernels
BESIDE_PANELS = LEFT + (BAR + BESIDE_COUNTS) + (BAR + BESIDE_WEIGHTS)
LEAST_WIDTH = 0.64  # of a panel
LEAST_HEIGHT = 0.3

BAR_TITLE_PAD = 5  # points; clears the highest number
MAX_KERNELS = 5  # in a row
MAX_TENSORS = 12  # positions tensors; of more, evenly spaced ones are shown
# Odd, so that an element at the centre of a cell is in the middle of a bin.
BINS_PER_CELL = 3
STYLE = {
    "figure.dpi": 160,
    "font.size": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "axes.linewidth": 0.5,
    "axes.titlesize": SMALL_FONT_SIZE,
    "axes.titlepad": 2,
    "figure.titlesize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "pdf.fonttype": 42,  # TrueType; many conferences refuse the default, Type 3
    "text.parse_math": False,
    "xtick.labelsize": SMALL_FONT_SIZE,
    "xtick.major.size": 2,
    "xtick.major.width": 0.5,
    "xtick.major.pad": 2,
    "ytick.labelsize": SMALL_FONT_SIZE,
    "ytick.major.size": 2,
    "ytick.major.width": 0.5,
    "ytick.major.pad": 2,
}
# Metadata that removes the date from the file, by suffix.
NO_DATE: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
HASH_SALT = "dcls-convert"  # without a salt, the names inside an SVG are random
OLD_KERNEL: dict[str, Any] = {"fill": False, "ec": "C1", "ls": "--", "lw": 0.7}
HEAT_MAP_LEGEND = (
    f"Left: number of elements in bins of 1/{BINS_PER_CELL} cell, coloured by its square root; "
    "axes are in cells from the centre. Dashed: the old kernel."
)
KERNELS_LEGEND = (
    "Right: kernels of the first layer with the most energy, by output channel{inputs}. Dots are "
    "their elements, black with a positive weight, white with a negative one."
)
VOLUME_LEGEND = "Of three axes, the last two are shown; kernels are summed over the first."


def draw(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    suffix: str,
    trainings: Sequence[Training] = (),
    width: float = PICTURE_WIDTH,
) -> bytes:
    """Return the figure as a file in the format of the suffix, such as ".png".

    Args:
        plan: The conversion's plan.
        state: The converted model's state dict; its positions fit the plan.
        suffix: Suffix of the file: .png, .svg or .pdf.
        trainings: From `history.read_trainings`, to be drawn below.
        width: Width in inches. Text has the same size at every width.

    Raises:
        CheckpointError: A layer's weight is missing, or has another shape than in the plan.
    """
    import matplotlib

    file = io.BytesIO()
    settings = cast(Any, {"svg.hashsalt": HASH_SALT} | STYLE)
    # matplotlib warns about characters that are missing in the font.
    with warnings.catch_warnings(action="ignore"), matplotlib.rc_context(settings):
        figure = make_figure(plan, state, trainings, width)
        suffix = suffix.lower()
        figure.savefig(file, format=suffix[1:], metadata=NO_DATE.get(suffix))
    return file.getvalue()


def make_figure(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    trainings: Sequence[Training] = (),
    width: float = PICTURE_WIDTH,
) -> "Figure":
    """Return the figure; the arguments are as in `draw`."""
    from matplotlib.figure import Figure

    groups = position_groups(plan.layers)
    shown = _evenly_spaced(len(groups))
    drawn = [groups[index] for index in shown]
    legend = _legend(drawn, len(groups), width)
    heights = [TITLES + _panel_size(layers[0], width)[1] + TICKS for layers in drawn]
    heights.append(LINE * (legend.count("\n") + 2))
    names = [first.group_name for first, *_ in groups]
    curves = Curves(names=names, shown=shown, trainings=trainings, width=width)
    if trainings:
        heights.append(curves.height)
    figure = Figure(figsize=(width, sum(heights)))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights, hspace=0)
    for part, layers in zip(parts[:, 0], drawn, strict=False):
        _draw_row(part, layers, state, width)
    add_text(parts[len(drawn), 0], legend)
    if trainings:
        curves.draw(parts[-1, 0])
    return figure


def _evenly_spaced(count: int) -> list[int]:
    """Return numbers of at most `MAX_TENSORS` items, evenly spaced, with the first and the last."""
    if count <= MAX_TENSORS:
        return list(range(count))
    return [round(number * (count - 1) / (MAX_TENSORS - 1)) for number in range(MAX_TENSORS)]


def _kernels_in_a_row(width: float) -> int:
    panels = int((width - BESIDE_PANELS) / (LEAST_WIDTH + GAP))
    return min(max(panels - 1, 1), MAX_KERNELS)


def _panel_size(layer: LayerPlan, width: float) -> tuple[float, float]:
    """Return the width and height of a row's panels in inches. Narrow windows are stretched."""
    panel_width = (width - BESIDE_PANELS) / (1 + _kernels_in_a_row(width)) - GAP
    rows, columns = _rows_and_columns(layer.dilated_size)
    return panel_width, min(max(panel_width * rows / columns, LEAST_HEIGHT), 1.5 * panel_width)


def _legend(drawn: Sequence[Sequence[LayerPlan]], groups: int, width: float) -> str:
    """Return the legend of the rows, in lines that fit a figure of this width."""
    layers = [first for first, *_ in drawn]
    inputs = ""
    if any(layer.in_channels > layer.groups for layer in layers):
        inputs = " and input channel"
    texts = [HEAT_MAP_LEGEND, KERNELS_LEGEND.format(inputs=inputs)]
    if any(layer.dims == 3 for layer in layers):
        texts.append(VOLUME_LEGEND)
    if len(drawn) < groups:
        texts.append(f"{len(drawn)} of {groups} positions tensors are shown.")
    return "\n".join(wrapped(text, width) for text in texts)


def _draw_row(
    row: "SubFigure", layers: Sequence[LayerPlan], state: Mapping[str, Tensor], width: float
) -> None:
    """Draw the positions that some layers share, and kernels of the first layer."""
    first = layers[0]
    counts = (
        f"{count_text(first.kernel_count, 'element')} in {size_text(first.dilated_size)}, "
        f"{count_text(len(layers), 'layer')}"
    )
    room = int((width - 2 * MARGIN) * CHARACTERS_PER_INCH) - len(counts)
    title = f"{shortened(first.group_name, room)}: {counts}"
    panel_width, height = _panel_size(first, width)
    add_text(row, title)
    tensors = {}
    for attribute, name in first.position_names.items():
        tensors[attribute] = state[name].detach().float().cpu()  # (A, O, I, *dense, E)
    left = LEFT

    def add_panel(panel_width: float, beside: float) -> "Axes":
        nonlocal left
        panel = add_axes(row, left, TICKS, panel_width, height)
        left += panel_width + beside
        return panel

    heat_map = add_panel(panel_width, GAP)
    _draw_positions(heat_map, add_panel(BAR, BESIDE_COUNTS), layers, tensors["positions"])
    kernels = min(first.out_channels * first.in_channels // first.groups, _kernels_in_a_row(width))
    panels = [add_panel(panel_width, GAP) for _ in range(kernels)]
    _draw_kernels(panels, add_panel(BAR, BESIDE_WEIGHTS), first, tensors, _weight_of(first, state))


def _draw_positions(
    axes: "Axes", bar_axes: "Axes", layers: Sequence[LayerPlan], positions: Tensor
) -> None:
    """Draw a heat map of positions (A, O, I, *dense, E), along the window's last two axes."""
    from matplotlib.colors import PowerNorm

    rows, columns = _element_coordinates(layers[0], positions.flatten(1, 2)).flatten(1).numpy()
    height, width = _rows_and_columns(layers[0].dilated_size)
    left, right, bottom, top = _limits(height, width)
    counts, _, _, mesh = axes.hist2d(
        columns,
        rows,
        bins=(width * BINS_PER_CELL, height * BINS_PER_CELL),
        range=((left, right), (top, bottom)),
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0),
        rasterized=True,
    )
    ticks = [sorted({*position_limits(side), 0}) for side in (width, height)]
    axes.set(ylim=(bottom, top), xticks=ticks[0], yticks=ticks[1])
    _draw_old_kernels(axes, layers)
    largest_count = int(counts.max())
    # Square-root scale: a quarter of the largest count is in the middle of the bar.
    axes.figure.colorbar(mesh, cax=bar_axes, ticks=sorted({0, largest_count // 4, largest_count}))
    bar_axes.set_title("elements", pad=BAR_TITLE_PAD)


def _draw_old_kernels(axes: "Axes", layers: Sequence[LayerPlan]) -> None:
    """Draw the outlines of the old kernels' cells; equal outlines once."""
    from matplotlib.patches import Rectangle

    for (top, bottom), (left, right) in dict.fromkeys(map(_old_limits, layers)):
        corner = (left - 0.5, top - 0.5)
        axes.add_patch(Rectangle(corner, right - left + 1, bottom - top + 1, **OLD_KERNEL))


def _old_limits(layer: LayerPlan) -> tuple[Pair, Pair]:
    """Return the old kernel's first and last row, and first and last column."""
    limits = [(0, 0), *map(position_limits, layer.dilated_size)]  # first: row if there is one axis
    for axis, old_limits in zip(layer.learnt_axes, layer.old_limits, strict=True):
        limits[1 + axis] = old_limits
    rows, columns = limits[-2:]
    return rows, columns


def _rows_and_columns(size: Sequence[int]) -> tuple[int, int]:
    """Return the last two sides of a window; a window of one axis is a row."""
    rows, columns = (1, *size)[-2:]
    return rows, columns


def _limits(rows: int, columns: int) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a window, in cells from the centre."""
    top, bottom = position_limits(rows)
    left, right = position_limits(columns)
    return left - 0.5, right + 0.5, bottom + 0.5, top - 0.5


def _draw_kernels(
    panels: Sequence["Axes"],
    bar_axes: "Axes",
    layer: LayerPlan,
    tensors: Mapping[str, Tensor],
    weight: Tensor,
) -> None:
    """Draw the layer's kernels with the most energy, and dots for their elements.

    Args:
        panels: One panel for each kernel.
        bar_axes: For the colour bar.
        layer: The layer's plan.
        tensors: Its positions and, if any, sigmas: (A, O, I, *dense, E).
        weight: (O, I, *dense, E).
    """
    kernels = construct_kernel(
        weight,
        tensors["positions"],
        layer.dilated_size,
        interpolation=layer.interpolation,
        sigma=tensors.get("sigma"),
        dense_axes=layer.dense_axes,
    ).flatten(0, 1)  # (O * I, *window)
    energies = kernels.square().flatten(1).sum(1)  # (O * I,)
    strongest = energies.argsort(descending=True, stable=True)[: len(panels)]  # (N,)
    coordinates = _element_coordinates(layer, tensors["positions"].flatten(1, 2)[:, strongest])
    weights = weight.flatten(0, 1)[strongest].flatten(1)  # (N, elements)
    # Kernels of three axes are summed over the first.
    size = _rows_and_columns(layer.dilated_size)
    cells = kernels[strongest].reshape(len(strongest), -1, *size).sum(1)  # (N, rows, columns)
    largest = float(cells.abs().max()) or 1.0
    for index, panel in enumerate(panels):
        panel.set(xticks=[], yticks=[])
        panel.set_title(_channels(layer, int(strongest[index])))
        image = _draw_kernel(panel, cells[index], largest, coordinates[:, index], weights[index])
        _draw_old_kernels(panel, [layer])
    ticks = [-largest, 0, largest]
    bar_axes.figure.colorbar(image, cax=bar_axes, ticks=ticks, format="{x:.2g}")
    bar_axes.set_title("weight", pad=BAR_TITLE_PAD)


def _channels(layer: LayerPlan, kernel: int) -> str:
    """Return the channels of a kernel (its number in O * I), counted from 0 over all groups."""
    inputs = layer.in_channels // layer.groups
    output, place = divmod(kernel, inputs)
    if layer.in_channels == layer.groups:
        return f"out {output}"
    group = output // (layer.out_channels // layer.groups)
    return f"out {output}, in {group * inputs + place}"


def _weight_of(layer: LayerPlan, state: Mapping[str, Tensor]) -> Tensor:
    """Return the stored weight of a layer, in float32."""
    name = f"{layer.name}.weight"
    shape = layer.position_shape[1:]
    stored = state.get(name)
    if stored is None:
        raise CheckpointError(f"{name} is missing, the plan has {shape}")
    if tuple(stored.shape) != shape:
        raise CheckpointError(f"{name} is {tuple(stored.shape)}, the plan has {shape}")
    return stored.detach().float().cpu()


def _element_coordinates(layer: LayerPlan, positions: Tensor) -> Tensor:
    """Return the row and column of each element, in cells from the centre: (2, N, elements).

    Along a dense axis, elements are at its cells. Elements of kernels with one axis are in row 0.

    Args:
        layer: The layer's plan.
        positions: (A, N, *dense, E).
    """
    dims = len(layer.dilated_size)
    coordinates = torch.zeros(1 + dims, *positions.shape[1:])  # index 0: row if there is one axis
    for axis, learnt in enumerate(learnt_axes(dims, layer.dense_axes)):
        coordinates[1 + learnt] = positions[axis]
    for place, axis in enumerate(layer.dense_axes):
        low, high = position_limits(layer.dilated_size[axis])
        shape = [1] * (positions.dim() - 1)  # broadcasts to (N, *dense, E)
        shape[1 + place] = -1
        coordinates[1 + axis] = torch.arange(low, high + 1).reshape(shape)
    return coordinates[-2:].flatten(2)


def _draw_kernel(
    axes: "Axes", cells: Tensor, largest: float, coordinates: Tensor, weights: Tensor
) -> Any:
    """Draw a kernel's cells (rows, columns), with dots at its elements (2, elements).

    The colours end at plus and minus `largest`. Returns the image of the cells.
    """
    limits = _limits(*cells.shape)
    image = axes.imshow(
        cells.numpy(), extent=limits, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto"
    )
    rows, columns = coordinates.numpy()
    colours: dict[str, Any] = {"c": (weights > 0).numpy(), "cmap": "gray_r", "vmin": 0, "vmax": 1}
    axes.scatter(columns, rows, s=3, edgecolors="black", linewidths=0.3, **colours)
    return image
