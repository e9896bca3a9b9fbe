"""The figure of a folder, drawn by matplotlib (extra `plot`), which is imported late.

Each row shows one positions tensor: where its elements are, and kernels of its first layer with
their elements. Below, curves show how the elements moved, if there is a record of a training.

Axes: A learnt axes, O output channels, I input channels per group, N drawn kernels, E elements.
"""

import io
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry import learnt_axes, position_limits, size_text
from ..layers.construction import construct_kernel
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..text import count_text, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from ..tuning.tracker import TrackRecord

PANEL_INCHES = 1.3  # width of a panel
ROW_INCHES = 1.7
HISTORY_INCHES = 2.8  # height of the curves
MAX_TENSORS = 12  # positions tensors; of more, the figure shows some from the first to the last
MAX_KERNELS = 6  # in a row
# Odd, so that an element at the centre of a cell is in the middle of a bin.
BINS_PER_CELL = 3
STYLE = {"figure.dpi": 120, "font.size": 7, "text.parse_math": False}
# Metadata, by suffix, that removes the date from the file.
NO_DATE: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
HASH_SALT = "dcls-convert"  # without a salt, the names inside an SVG are random
LEGEND = (
    "Left: all elements, in cells from the centre; darker where there are more; dashed: the old "
    "kernel.\nRight: the first layer's kernels with the most energy, each on its own scale: blue "
    "cells are positive, red ones negative.\n"
    "Dots are elements: black if their weight is positive, else white."
)
# Fields of a `TrackedPositions`, and their labels.
CURVES = {
    "speed": "speed (cells per step)",
    "spread": "spread (cells)",
    "border_share": "share at the border",
}
LINE_STYLES = ("-", "--", ":")
LEGEND_COLUMNS = 4
Item = TypeVar("Item")


def draw(
    plan: ConversionPlan,
    state: Mapping[str, Tensor],
    suffix: str,
    history: Sequence["TrackRecord"] = (),
) -> bytes:
    """Return the figure as a file in the format of the suffix, such as ".png".

    Args:
        plan: The conversion's plan.
        state: The converted model's state dict; its positions fit the plan.
        suffix: Of the file: .png, .svg or .pdf.
        history: From `history.read_history`, to be drawn below.

    Raises:
        CheckpointError: A layer's weight is missing, or has another shape than in the plan.
    """
    import matplotlib

    file = io.BytesIO()
    settings = cast(Any, {"svg.hashsalt": HASH_SALT} | STYLE)
    # matplotlib warns about characters that are missing in the font.
    with warnings.catch_warnings(action="ignore"), matplotlib.rc_context(settings):
        figure = make_figure(plan, state, history)
        suffix = suffix.lower()
        metadata = NO_DATE.get(suffix)
        figure.savefig(file, format=suffix[1:], metadata=metadata, bbox_inches="tight")
    return file.getvalue()


def make_figure(
    plan: ConversionPlan, state: Mapping[str, Tensor], history: Sequence["TrackRecord"] = ()
) -> "Figure":
    """Return the figure; the arguments are those of `draw`."""
    from matplotlib.figure import Figure

    groups = position_groups(plan.layers)
    drawn = _some(groups, MAX_TENSORS)
    heights = [len(drawn) * ROW_INCHES]
    if history:
        heights.append(HISTORY_INCHES)
    width = (1 + MAX_KERNELS) * PANEL_INCHES
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    rows = parts[0].subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for row, layers in zip(rows, drawn, strict=True):
        _draw_row(row, layers, state)
    legend = LEGEND
    if len(drawn) < len(groups):
        legend += f"\n{len(drawn)} of {len(groups)} positions tensors are shown."
    parts[0].supxlabel(legend, fontsize="medium")
    if history:
        _draw_history(parts[1], [first.group_name for first, *_ in groups], history)
    return figure


def _some(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most this many items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _draw_row(row: "SubFigure", layers: Sequence[LayerPlan], state: Mapping[str, Tensor]) -> None:
    """Draw where the elements that some layers share are, and kernels of the first layer."""
    first = layers[0]
    size = size_text(first.dilated_size)
    row.suptitle(
        f"{shortened(first.group_name, 50)}: {count_text(first.kernel_count, 'element')} in {size}"
        f", {count_text(len(layers), 'layer')}",
        x=0.01,
        ha="left",
    )
    panels = row.subplots(1, 1 + MAX_KERNELS)
    _draw_positions(panels[0], layers, state[first.position_names["positions"]])
    _draw_kernels(panels[1:], first, state)


def _draw_positions(axes: "Axes", layers: Sequence[LayerPlan], positions: Tensor) -> None:
    """Draw a heat map of positions (A, ...), along the last two learnt axes.

    The old kernels are dashed rectangles.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    coordinates = positions.detach().cpu().double().flatten(1)
    if len(coordinates) == 1:
        coordinates = torch.cat([torch.zeros_like(coordinates), coordinates])
    rows, columns = coordinates[-2:].numpy()
    height, width = _rows_and_columns(layers[0].learnt_size)
    left, right, bottom, top = _limits(height, width)
    axes.hist2d(
        columns,
        rows,
        bins=(width * BINS_PER_CELL, height * BINS_PER_CELL),
        range=((left, right), (top, bottom)),
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0),
        rasterized=True,
    )
    axes.set(aspect="equal", ylim=(bottom, top))
    axes.locator_params(nbins=5, integer=True, min_n_ticks=1)
    for old_limits in dict.fromkeys(tuple(layer.old_limits) for layer in layers):
        (top, bottom), (left, right) = ((0, 0), *old_limits)[-2:]
        corner = (left - 0.5, top - 0.5)
        size = (right - left + 1, bottom - top + 1)
        axes.add_patch(Rectangle(corner, *size, fill=False, ec="C1", ls="--"))


def _rows_and_columns(size: Sequence[int]) -> tuple[int, int]:
    """Return the last two sides of a window; a window of one axis is a row."""
    rows, columns = (1, *size)[-2:]
    return rows, columns


def _limits(rows: int, columns: int) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of a window, in cells from the centre."""
    top, bottom = position_limits(rows)
    left, right = position_limits(columns)
    return left - 0.5, right + 0.5, bottom + 0.5, top - 0.5


def _draw_kernels(panels: Sequence["Axes"], layer: LayerPlan, state: Mapping[str, Tensor]) -> None:
    """Draw the kernels of a layer with the most energy, and dots for their elements."""
    weight = _weight_of(layer, state)  # (O, I, *dense, E)
    tensors = {}
    for attribute, name in layer.position_names.items():
        tensors[attribute] = state[name].detach().float().cpu()  # (A, O, I, *dense, E)
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
    for panel in panels:
        panel.set(xticks=[], yticks=[])
    for panel in panels[len(strongest) :]:
        panel.set_axis_off()
    for index, panel in enumerate(panels[: len(strongest)]):
        kernel = kernels[strongest[index]]
        # Kernels of three axes are summed over the first.
        cells = kernel.reshape(-1, *_rows_and_columns(kernel.shape)).sum(0)  # (rows, columns)
        _draw_kernel(panel, cells, coordinates[:, index], weights[index])


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
    coordinates = torch.zeros(1 + dims, *positions.shape[1:])  # the first stays 0: row of one axis
    for axis, learnt in enumerate(learnt_axes(dims, layer.dense_axes)):
        coordinates[1 + learnt] = positions[axis]
    for place, axis in enumerate(layer.dense_axes):
        low, high = position_limits(layer.dilated_size[axis])
        shape = [1] * (positions.dim() - 1)  # broadcasts to (N, *dense, E)
        shape[1 + place] = -1
        coordinates[1 + axis] = torch.arange(low, high + 1).reshape(shape)
    return coordinates[-2:].flatten(2)


def _draw_kernel(axes: "Axes", cells: Tensor, coordinates: Tensor, weights: Tensor) -> None:
    """Draw a kernel's cells (rows, columns), with dots at its elements (2, elements)."""
    largest = float(cells.abs().max()) or 1.0
    limits = _limits(*cells.shape)
    axes.imshow(cells.numpy(), extent=limits, cmap="RdBu", vmin=-largest, vmax=largest)
    rows, columns = coordinates.numpy()
    colours: dict[str, Any] = {"c": (weights > 0).numpy(), "cmap": "gray_r", "vmin": 0, "vmax": 1}
    axes.scatter(columns, rows, s=4, edgecolors="black", linewidths=0.4, **colours)


def _draw_history(
    part: "SubFigure", names: Sequence[str], records: Sequence["TrackRecord"]
) -> None:
    """Draw speed, spread and border share over the steps.

    Args:
        part: The part of the figure to draw on.
        names: Of the positions tensors, in the order of the records.
        records: At least one.
    """
    import matplotlib

    steps = [record.step for record in records]
    rows_of_steps = [list(record.positions.values()) for record in records]
    # From dark, the first layers, to light. The lightest shades are left out.
    shades = torch.linspace(0, 0.85, len(names))
    colours = matplotlib.colormaps["viridis"](shades.numpy())
    panels = part.subplots(1, len(CURVES))
    for panel, (field, label) in zip(panels, CURVES.items(), strict=True):
        styles = itertools.cycle(LINE_STYLES)
        for index, (name, colour, style) in enumerate(zip(names, colours, styles, strict=False)):
            heights = []
            for rows in rows_of_steps:
                height = getattr(rows[index], field)
                heights.append(math.nan if height is None else height)
            # With points, since no line leads to a known value between unknown ones.
            points = {"marker": ".", "markersize": 4}
            panel.plot(steps, heights, style, color=colour, label=shortened(name, 30), **points)
        panel.set(xlabel="step", ylabel=label)
        panel.locator_params(axis="x", integer=True, min_n_ticks=1)
        panel.update_datalim([(steps[0], 0)])  # so that the margin is a share of 0 to top
        panel.set_ylim(bottom=0)
    part.legend(handles=panels[0].lines, loc="outside lower center", ncols=LEGEND_COLUMNS)
