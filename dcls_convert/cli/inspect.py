"""`dcls-convert inspect`: where a checkpoint's elements are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..errors import printable
from ..files import check_folder, check_images, check_picture, check_weights_file
from ..options import FigureName
from ..tables import Name, counted, plain_table
from . import console
from .arguments import OUTPUT, Checkpoint, Force, Json, TrustCode, image_size, option, refuse

LEAST_NAME = 16  # columns; most rows are tie groups, whose names are short

if TYPE_CHECKING:
    from ..checkpoints.inspection import Inspection, PositionRow

PICTURES = "Pictures"  # a group of --help
HTML_HELP = "Write a page of pictures: positions, kernels, effective receptive field, cost."
PICTURE_HELP = "Draw one figure into a .png, .svg or .pdf (extra plot)."
FIELD_HELP = "for the effective receptive field"


def inspect(
    checkpoint: Checkpoint,
    json_: Json = False,
    plan: Annotated[bool, option(OUTPUT, "Print the checkpoint's plan as JSON instead.", "--plan")] = False,
    html: Annotated[Path | None, option(PICTURES, HTML_HELP, metavar="FILE")] = None,
    picture: Annotated[Path | None, option(PICTURES, PICTURE_HELP, metavar="FILE")] = None,
    figure: Annotated[FigureName, option(PICTURES, "Which one --picture draws.")] = "positions",
    history: Annotated[
        Path | None, option(PICTURES, "What a PositionTracker wrote in training.", metavar="positions.jsonl")
    ] = None,
    images: Annotated[
        Path | None, option(PICTURES, f"Images {FIELD_HELP}.", metavar="FOLDER", show_default="seeded noise")
    ] = None,
    original: Annotated[
        Path | None, option(PICTURES, "Weights of the network before conversion, to compare with.", metavar="FILE")
    ] = None,
    input_size: Annotated[Any, image_size(PICTURES, f"Image size {FIELD_HELP}; the paper's is 3x1024x1024.")] = None,
    force: Force = False,
    trust_code: TrustCode = False,
) -> None:
    """Show where a checkpoint's elements are: at the window's border, overlapping, how far from the centre."""
    refuse({"--plan and --json exclude each other; the plan is JSON": plan and json_})
    wanted = _Wanted(html, picture, figure, history, images, original, input_size)
    _check(wanted, force=force, alone=plan)
    check_folder(checkpoint)
    with console.steps(checkpoint, lines=False) as notify:
        notify("reading")  # which begins with imports of some seconds
        from ..checkpoints.folder import read_plan
        from ..checkpoints.inspection import inspect_folder

        found = read_plan(checkpoint) if plan else inspect_folder(checkpoint)
    if wanted.outputs:
        _draw(checkpoint, wanted, force=force, trust_code=trust_code)
    with console.standing(" and ".join(map(str, wanted.outputs)) or None):
        if plan or json_:
            console.write(found.to_json())
        else:
            lines = [f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB)." for path in wanted.outputs]
            console.show(_view(cast("Inspection", found)), *["", *lines] * bool(lines))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The pictures that are asked for."""

    html: Path | None
    picture: Path | None
    figure: FigureName  # of `picture`
    history: Path | None
    images: Path | None
    original: Path | None
    input_size: tuple[int, ...] | None

    @property
    def outputs(self) -> list[Path]:
        return [path for path in (self.html, self.picture) if path is not None]

    def draws(self, figure: FigureName) -> bool:
        return self.html is not None or (self.picture is not None and self.figure == figure)


def _check(wanted: _Wanted, *, force: bool, alone: bool) -> None:
    """Refuse what contradicts itself, and files that cannot be read or written, before any work."""
    of_field, field = (wanted.images, wanted.original, wanted.input_size), "--picture with --figure receptive-field"
    refuse(
        {
            "--plan prints the plan alone; leave --html and --picture": alone and bool(wanted.outputs),
            "--html and --picture name the same file": len(set(wanted.outputs)) < len(wanted.outputs),
            "--force replaces the file of --html or --picture": force and not wanted.outputs,
            "--figure says what --picture draws": wanted.figure != "positions" and wanted.picture is None,
            "--figure history needs --history": wanted.figure == "history" and wanted.history is None,
            "--history is for --html, or --picture with --figure history": wanted.history is not None
            and not wanted.draws("history"),
            f"--images, --original and --input-size are for --html, or {field}": any(
                part is not None for part in of_field
            )
            and not wanted.draws("receptive-field"),
        }
    )
    if wanted.picture is not None:
        check_picture(wanted.picture, "--picture")
    if wanted.images is not None:
        check_images(wanted.images, "images")
    for path, what in ((wanted.original, "original"), (wanted.history, "history")):
        if path is not None:
            check_weights_file(path, what)
    for path in wanted.outputs:
        from ..output import check_output, not_a_file

        check_output(path, force=force, foreign=not_a_file)


def _draw(checkpoint: Path, wanted: _Wanted, *, force: bool, trust_code: bool) -> None:
    """Write what is wanted, each file whole or not at all."""
    with console.steps(str(checkpoint), quiet=False) as notify:
        notify("starting")  # with imports of some seconds
        from ..output import new_file
        from ..views.page import page
        from ..views.pictures import FieldOptions, pictures_of_folder
        from ..views.plot import draw

        fields = FieldOptions(images=wanted.images, original=wanted.original, input_size=wanted.input_size)
        pictures = pictures_of_folder(
            checkpoint,
            fields=fields if wanted.draws("receptive-field") else None,
            history=wanted.history,
            trust_code=trust_code,
            notify=notify,
            note=console.note,
        )
        notify("writing")
        if wanted.html is not None:
            with new_file(wanted.html, force=force) as partial:
                partial.write_text(page(pictures), encoding="utf-8")
        if wanted.picture is not None:
            with new_file(wanted.picture, force=force) as partial:
                partial.write_bytes(draw(pictures, wanted.figure, wanted.picture.suffix))


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
    from ..depthwise.geometry import size_text

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
