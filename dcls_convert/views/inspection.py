"""An inspection as a table, with a row for each positions tensor, and what the columns mean."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.inspection import Inspection, PositionRow
from ..conversion.provenance import provenance_lines
from ..geometry import size_text
from ..tables import Column, Table, indented, title
from ..text import count_text

# Terminal columns of the names; most rows are tie groups, whose names are short.
NAME_WIDTH = 16


def _elements(row: PositionRow) -> str:
    """Return "34 in 17x17"; empty for a row of totals."""
    if not row.kernel_count:
        return ""
    return f"{row.kernel_count} in {size_text(row.dilated_size)}"


POSITION_COLUMNS: list[Column[PositionRow]] = [
    Column("Positions", lambda row: row.name),
    Column("Layers", lambda row: len(row.layers)),
    Column("Elements", _elements),
    Column("Border", lambda row: 100 * row.border_share, "{:.1f} %".format),
    Column("Overlap", lambda row: 100 * row.overlap_share, "{:.1f} %".format),
    Column("Spread", lambda row: " ".join(f"{side:.2f}" for side in row.spread)),
    Column("Distance", lambda row: row.mean_distance, "{:.2f}".format),
    Column("Sigma", lambda row: row.mean_sigma, "{:.2f}".format),
]


def inspection_view(inspection: Inspection) -> RenderableType:
    """Return an inspection as it is shown in a terminal of at least 80 columns."""
    rows = inspection.positions
    border = f"elements within {inspection.border_margin:g} cells of the window's limit"
    near = f"elements closer than {inspection.overlap_distance:g} cell"
    elements = f"{inspection.elements:,} distinct elements"
    lines = [
        f"{count_text(len(rows), 'positions tensor')}{_shared(rows)}; {elements}.",
        "Elements: of one kernel, and the window in which they move.",
        f"Border: {border}; if many are there, the window is too small.",
        f"Overlap: {near} to another of their kernel; near 100 % is normal right after a random "
        "start near the centre.",
        "Spread: root mean square of the coordinates along each axis. Distance: mean distance. "
        "Both from the kernel's centre, in cells.",
    ]
    if any(row.mean_sigma is not None for row in rows):
        lines.append("Sigma: mean width of the elements, in cells.")
    model = "" if inspection.model is None else f", {inspection.model} with DCLS"
    heading = title(inspection.folder, model)
    table = Table(POSITION_COLUMNS, rows, totals=_totals(inspection), min_name_width=NAME_WIDTH)
    parts: list[RenderableType] = [heading, Text(), table, Text(), *map(indented, lines)]
    if inspection.provenance is not None:
        parts += [Text(), Text(" Conversion:", style="bold")]
        parts += map(indented, provenance_lines(inspection.provenance))
    return Group(*parts)


def _totals(inspection: Inspection) -> list[PositionRow]:
    """Return a row for all positions tensors together if there are several, else no row."""
    rows = inspection.positions
    if len(rows) < 2:
        return []
    total = replace(
        rows[0],
        name="all",
        layers=tuple(layer for row in rows for layer in row.layers),
        kernel_count=0,
        border_share=inspection.mean_over_elements("border_share"),
        overlap_share=inspection.mean_over_elements("overlap_share"),
        mean_distance=inspection.mean_over_elements("mean_distance"),
        spread=(),
        mean_sigma=None,
    )
    return [total]


def _shared(rows: Sequence[PositionRow]) -> str:
    """Say how many of the positions tensors are shared by several layers, as a suffix."""
    tied = sum(row.tied for row in rows)
    if tied == len(rows):
        each = ", each" if len(rows) > 1 else ""
        return f"{each} shared within a stage"
    if tied:
        return f", {tied} shared within a stage"
    return ""
