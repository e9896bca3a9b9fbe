"""`dcls-convert inspect`: where a checkpoint's elements are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..errors import DclsConvertError, printable
from ..files import check_folder
from ..tables import Name, counted, plain_table
from . import console
from .arguments import OUTPUT, Checkpoint, Json, option

LEAST_NAME = 16  # columns; most rows are tie groups, whose names are short

if TYPE_CHECKING:
    from ..checkpoints.inspection import Inspection, PositionRow


def inspect(
    checkpoint: Checkpoint,
    json_: Json = False,
    plan: Annotated[bool, option(OUTPUT, "Print the checkpoint's plan as JSON instead.", "--plan")] = False,
) -> None:
    """Show where a checkpoint's elements are: at the window's border, overlapping, how far from the centre."""
    if plan and json_:
        raise DclsConvertError("--plan and --json exclude each other; the plan is JSON")
    check_folder(checkpoint)
    with console.steps(checkpoint, lines=False) as step:
        step("reading")  # which begins with imports of some seconds
        from ..checkpoints.folder import read_plan
        from ..checkpoints.inspection import inspect_folder

        found = read_plan(checkpoint) if plan else inspect_folder(checkpoint)
    if plan or json_:
        console.write(found.to_json())
    else:
        console.show(_view(cast("Inspection", found)))


def _view(inspection: "Inspection") -> RenderableType:
    """A row for each positions tensor, and what the columns mean; for a terminal of 80 columns or more."""
    has_sigma = any(row.mean_sigma is not None for row in inspection.positions)
    headings = ["Layers", "Elements", "Border", "Overlap", "Spread", "Distance"]
    table = plain_table("Positions", *headings, *["Sigma"] * has_sigma, least_name=LEAST_NAME)
    for row in inspection.positions:
        table.add_row(*_cells(row, has_sigma))
    if len(inspection.positions) > 1:
        layers = sum(len(row.layers) for row in inspection.positions)
        shares = [_percent(inspection.share(name)) for name in ("border_share", "overlap_share")]
        distance = f"{inspection.share('mean_distance'):.2f}"
        table.add_section()
        table.add_row("all", str(layers), "", *shares, "", distance, *[""] * has_sigma, style="bold")
    title = Text(printable(inspection.folder), style="bold")
    if inspection.model is not None:
        title += Text(printable(f", {inspection.model} with DCLS"), style="not bold dim")
    notes = [Padding(Text(line), (0, 0, 0, 1), expand=False) for line in _sentences(inspection, has_sigma)]
    return Group(title, Text(), table, Text(), *notes)


def _cells(row: "PositionRow", has_sigma: bool) -> Sequence[RenderableType]:
    from ..layers.geometry import size_text

    sigma = "" if row.mean_sigma is None else f"{row.mean_sigma:.2f}"
    return [
        Name(row.name),
        str(len(row.layers)),
        f"{row.kernel_count} in {size_text(row.dilated_size)}",
        _percent(row.border_share),
        _percent(row.overlap_share),
        " ".join(f"{side:.2f}" for side in row.spread),
        f"{row.mean_distance:.2f}",
        *[sigma] * has_sigma,
    ]


def _sentences(inspection: "Inspection", has_sigma: bool) -> list[str]:
    tied = sum(row.tied for row in inspection.positions)
    alone = len(inspection.positions) - tied
    kinds = [f"{tied} shared by the layers of a tie group"] * bool(tied) + [f"{alone} of one layer"] * bool(alone)
    tensors = counted(len(inspection.positions), "positions tensor")
    lines = [
        f"{tensors}: {', '.join(kinds)}; {inspection.elements:,} elements in all, shared ones once.",
        "Elements: of one kernel, and the window in which they move.",
        f"Border: elements within {inspection.border_margin:g} cells of the window's limit; where they are many, the "
        "window is too small.",
        f"Overlap: elements nearer than {inspection.overlap_distance:g} cell to another of their kernel.",
        "Spread: standard deviation along each axis. Distance: mean. Both from the kernel's centre, in cells.",
    ]
    return lines + ["Sigma: mean width of the elements, in cells."] * has_sigma


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
