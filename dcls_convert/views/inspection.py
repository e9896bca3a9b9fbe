"""How an inspection looks: a row for each positions tensor, and what the columns mean."""

from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.inspection import Inspection, PositionRow
from ..depthwise.geometry import size_text
from ..tables import Column, Table, counted, indented, title

LEAST_NAME = 16  # columns; most rows are tie groups, whose names are short

COLUMNS: list[Column[PositionRow]] = [
    Column("Positions", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column(
        "Elements",
        lambda row: (
            f"{row.kernel_count} in {size_text(row.dilated_size)}" if row.kernel_count else ""
        ),
    ),
    Column("Border", lambda row: 100 * row.border_share, "{:.1f} %".format),
    Column("Overlap", lambda row: 100 * row.overlap_share, "{:.1f} %".format),
    Column("Spread", lambda row: " ".join(f"{side:.2f}" for side in row.spread)),
    Column("Distance", lambda row: row.mean_distance, "{:.2f}".format),
    Column("Sigma", lambda row: row.mean_sigma, "{:.2f}".format),
]


def inspection_view(inspection: Inspection) -> RenderableType:
    """For a terminal of 80 columns or more."""
    rows, totals = inspection.positions, []
    if len(rows) > 1:
        names = ("border_share", "overlap_share", "mean_distance")
        means: dict[str, Any] = {name: inspection.share(name) for name in names}
        layers = tuple(layer for row in rows for layer in row.layers)
        totals = [
            replace(
                rows[0],
                name="all",
                layers=layers,
                kernel_count=0,
                spread=(),
                mean_sigma=None,
                **means,
            )
        ]
    tied = sum(row.tied for row in rows)
    each = ", each" if len(rows) > 1 else ""
    shared = (
        f"{each} shared within a stage"
        if tied == len(rows)
        else f", {tied} shared within a stage" * bool(tied)
    )
    lines = [
        f"{counted(len(rows), 'position tensor')}{shared}; {inspection.elements:,} distinct elements.",
        "Elements: of one kernel, and the window in which they move.",
        f"Border: elements within {inspection.border_margin:g} cells of the window's limit; where they are many, the "
        "window is too small.",
        f"Overlap: elements nearer than {inspection.overlap_distance:g} cell to another of their kernel.",
        "Spread: standard deviation along each axis. Distance: mean. Both from the kernel's centre, in cells.",
    ]
    lines += ["Sigma: mean width of the elements, in cells."] * any(
        row.mean_sigma is not None for row in rows
    )
    head = title(
        inspection.folder, "" if inspection.model is None else f", {inspection.model} with DCLS"
    )
    table = Table(COLUMNS, rows, totals=totals, least_name=LEAST_NAME)
    return Group(head, Text(), table, Text(), *map(indented, lines))
