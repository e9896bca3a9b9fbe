"""How a layer looks in a notebook: its sizes, and where its elements are."""

from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.text import Text

from ..depthwise.geometry import size_text
from ..tables import Column, Table, as_html, title

if TYPE_CHECKING:
    from ..layers.dcls_conv import DclsConvNd

CELL = 10  # pixels of the picture


@torch.no_grad()
def layer_html(layer: "DclsConvNd") -> str:
    """A table of a row; and where elements move along one or two axes, a map of their window as SVG.

    Each cell is a square, the darker the more elements of all kernels are nearest to it.
    """
    columns: list[Column[DclsConvNd]] = [
        Column("Channels", lambda layer: f"{layer.in_channels} → {layer.out_channels}"),
        Column("Kernel", lambda layer: size_text(layer.dilated_kernel_size), left=True),
        Column("Elements", lambda layer: layer.kernel_count, "{:,}".format),
        Column("Groups", lambda layer: layer.groups, "{:,}".format),
        Column("Stride", lambda layer: size_text(layer.stride)),
        Column("Interpolation", lambda layer: layer.interpolation),
        Column("Positions", lambda layer: "tied" if layer.is_tied else "its own"),
    ]
    shown = as_html(Group(title(type(layer).__name__), Text(), Table(columns, [layer])))
    positions, sides = layer.positions, [layer.dilated_kernel_size[axis] for axis in layer.learnt_axes]
    if positions.is_meta or len(sides) > 2 or not bool(positions.isfinite().all()):
        return f"<div>{shown}</div>"
    cells = (1, *sides)[-2:]
    index = torch.zeros_like(positions[0], dtype=torch.long)
    for along, side in zip(positions, sides, strict=True):
        index = index * side + (along.float() + side // 2).round().long().clamp(0, side - 1)
    counts = index.flatten().bincount(minlength=cells[0] * cells[1]).tolist()
    squares = "".join(
        f'<rect x="{cell % cells[1] * CELL}" y="{cell // cells[1] * CELL}" width="{CELL}" height="{CELL}" '
        f'fill="#1f77b4" fill-opacity="{count / max(counts):.2f}"><title>{count:,}</title></rect>'
        for cell, count in enumerate(counts)
    )
    size = f'width="{cells[1] * CELL}" height="{cells[0] * CELL}"'
    frame = f'<rect {size} fill="none" stroke="#888"/>'
    return f'<div>{shown}<svg xmlns="http://www.w3.org/2000/svg" {size}>{squares}{frame}</svg></div>'
