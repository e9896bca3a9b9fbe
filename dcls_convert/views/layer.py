"""How a layer looks in a notebook: its sizes, and where its elements are."""

from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.text import Text

from ..depthwise.geometry import size_text
from ..tables import Column, Table, as_html, title
from .elements import heat_map

if TYPE_CHECKING:
    from ..layers.dcls_conv import DclsConvNd

CELL = 10  # pixels of the picture


@torch.no_grad()
def layer_html(layer: "DclsConvNd") -> str:
    """A table of a row; and for one or two axes, a map of the window, darker where more elements are nearest."""
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
    heat = heat_map(positions, sides, 1)
    height, width = heat.shape
    squares = "".join(
        f'<rect x="{cell % width * CELL}" y="{cell // width * CELL}" width="{CELL}" height="{CELL}" '
        f'fill="#1f77b4" fill-opacity="{count / int(heat.max()):.2f}"><title>{count:,}</title></rect>'
        for cell, count in enumerate(heat.flatten().tolist())
    )
    size = f'width="{width * CELL}" height="{height * CELL}"'
    frame = f'<rect {size} fill="none" stroke="#888"/>'
    return f'<div>{shown}<svg xmlns="http://www.w3.org/2000/svg" {size}>{squares}{frame}</svg></div>'
