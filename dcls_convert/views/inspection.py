"""An inspection as a table, with a row for each positions tensor, and what the columns mean."""

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.inspection import Inspection, PositionRow
from ..conversion.provenance import provenance_lines
from ..geometry import size_text
from ..tables import Table, indented, title
from ..text import count_text


def inspection_view(inspection: Inspection) -> RenderableType:
    """Return an inspection as it is shown in a terminal of at least 80 columns."""
    model = "" if inspection.model is None else f", {inspection.model} with DCLS"
    heading = title(inspection.folder, model)
    parts: list[RenderableType] = [heading, Text(), _table(inspection), Text()]
    parts += map(indented, _sentences(inspection))
    if inspection.provenance is not None:
        parts += [Text(), Text(" Conversion:", style="bold")]
        parts += map(indented, provenance_lines(inspection.provenance))
    return Group(*parts)


def _sentences(inspection: Inspection) -> list[str]:
    """Say what the columns of the table mean."""
    rows = inspection.positions
    border = f"elements within {inspection.border_margin:g} cells of the window's limit"
    near = f"elements closer than {inspection.overlap_distance:g} cells"
    elements = f"{inspection.elements:,} distinct elements"
    lines = [
        f"{count_text(len(rows), 'positions tensor')}; {elements}.",
        "Elements: number per kernel, and the window in which they move.",
        f"Border: {border}; if many are there, the window is too small: "
        "dcls-convert FOLDER --dilated-size N gives a larger one.",
        f"Overlap: {near} to another of their kernel; near 100 % is normal right after a random "
        "start near the centre.",
        "Spread: root mean square of the coordinates along each axis. Distance: mean distance. "
        "Both from the kernel's centre, in cells.",
    ]
    if any(row.grow for row in rows):
        lines.append(
            "In windows that grow to one side, distances count from the old kernel, and Border "
            "counts the end to which the window grows."
        )
    if any(row.mean_sigma is not None for row in rows):
        lines.append("Sigma: mean width of the elements, in cells.")
    largest_moves = [row.largest_move for row in rows if row.largest_move is not None]
    if largest_moves:
        largest = f"the largest is {max(largest_moves):.2f}"
        lines.append(f"Moved: mean distance from the start, in cells; {largest}.")
    return lines


def _grow_text(row: PositionRow) -> str:
    """Return the sides to which a window grows, with a space before: " back" or " back, both"."""
    return "" if not row.grow else f" {', '.join(row.grow)}"


def _table(inspection: Inspection) -> Table:
    """Return a table with a row for each positions tensor, and one for all together."""
    table = Table(
        "Positions",
        "Layers",
        "Elements",
        "Border",
        "Overlap",
        "Spread",
        "Distance",
        "Sigma",
        "Moved",
    )
    rows = inspection.positions
    for row in rows:
        table.add(
            row.name,
            str(len(row.layers)),
            f"{row.kernel_count} in {size_text(row.dilated_size)}{_grow_text(row)}",
            f"{100 * row.border_share:.1f} %",
            f"{100 * row.overlap_share:.1f} %",
            " ".join(f"{side:.2f}" for side in row.spread),
            f"{row.mean_distance:.2f}",
            None if row.mean_sigma is None else f"{row.mean_sigma:.2f}",
            None if row.mean_move is None else f"{row.mean_move:.2f}",
        )
    if len(rows) > 1:
        table.add_total(
            "all",
            str(sum(len(row.layers) for row in rows)),
            None,
            f"{100 * inspection.mean_over_elements('border_share'):.1f} %",
            f"{100 * inspection.mean_over_elements('overlap_share'):.1f} %",
            None,
            f"{inspection.mean_over_elements('mean_distance'):.2f}",
            None,
            None,
        )
    return table
