"""`dcls-convert inspect`: where a checkpoint's elements are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from ..files import check_images, check_picture, check_weights_file
from ..options import FigureName
from ..output import check_output, new_file, not_a_file
from . import console
from .arguments import OUTPUT, CheckpointFolder, Force, Json, TrustCode, image_size, option, refuse

if TYPE_CHECKING:
    from ..checkpoints.inspection import Inspection
    from ..views.page import Pictures

PICTURES = "Pictures"  # a group of --help
PAGE_HELP = "Write a page of pictures: positions, kernels, effective receptive field, cost."
FIGURE_HELP = "Draw one figure into a .png, .svg or .pdf (extra plot)."
HISTORY = option(PICTURES, "What a PositionTracker wrote in training.", metavar="positions.jsonl")
FIELD = "for the effective receptive field"
IMAGES = option(PICTURES, f"Images {FIELD}.", metavar="FOLDER", show_default="seeded noise")
ORIGINAL = option(
    PICTURES, "Weights of the network before conversion, to compare with.", metavar="FILE"
)


def inspect(
    checkpoint: CheckpointFolder,
    json_: Json = False,
    plan: Annotated[
        bool, option(OUTPUT, "Print the checkpoint's plan as JSON instead.", "--plan")
    ] = False,
    html: Annotated[Path | None, option(PICTURES, PAGE_HELP, metavar="FILE")] = None,
    picture: Annotated[Path | None, option(PICTURES, FIGURE_HELP, metavar="FILE")] = None,
    figure: Annotated[FigureName, option(PICTURES, "Which one --picture draws.")] = "positions",
    history: Annotated[Path | None, HISTORY] = None,
    images: Annotated[Path | None, IMAGES] = None,
    original: Annotated[Path | None, ORIGINAL] = None,
    input_size: Annotated[
        Any, image_size(PICTURES, f"Image size {FIELD}; the paper's is 3x1024x1024.")
    ] = None,
    force: Force = False,
    trust_code: TrustCode = False,
) -> None:
    """Show where a checkpoint's elements are: at the border, overlapping, far from the centre."""
    outputs = [path for path in (html, picture) if path is not None]
    drawn = _figures(html, picture, figure)
    describes_field = images or original or input_size
    refuse(
        (plan and json_, "--plan and --json exclude each other; the plan is JSON"),
        (plan and outputs, "--plan prints the plan alone; omit --html and --picture"),
        (force and not outputs, "--force replaces the file of --html or --picture"),
        (figure != "positions" and picture is None, "--figure says what --picture draws"),
        (figure == "history" and history is None, "--figure history needs --history"),
        (
            history and "history" not in drawn,
            "--history is for --html, or --picture with --figure history",
        ),
        (
            describes_field and "receptive-field" not in drawn,
            "--images, --original and --input-size are for --html, "
            "or --picture with --figure receptive-field",
        ),
    )
    _check_files(picture, images, original, history)
    for path in outputs:
        check_output(path, force=force, foreign=not_a_file)

    with console.steps(checkpoint, "reading", lines=bool(outputs)) as notify:
        from ..checkpoints.folder import open_checkpoint

        opened = open_checkpoint(checkpoint)
        if plan:
            text = opened.plan.to_json()
        elif outputs:
            from ..views.page import pictures_of_folder
            from ..views.receptive_field import FieldOptions

            fields = None
            if "receptive-field" in drawn:
                fields = FieldOptions(images, original, input_size)
            pictures = pictures_of_folder(
                opened, fields, history, notify, console.note, trust_code=trust_code
            )
            inspection = pictures.inspection
            notify("writing")
            _write(pictures, html, picture, figure, force=force)
        else:
            from ..checkpoints.inspection import inspect_checkpoint

            inspection = inspect_checkpoint(opened)
    if plan:
        console.write(text)
    elif json_:
        console.write(inspection.to_json())
    else:
        _show(inspection, outputs)


def _figures(html: Path | None, picture: Path | None, figure: str) -> tuple[str, ...]:
    """The figures that are drawn: all on a page, one as a picture."""
    if html is not None:
        return get_args(FigureName)
    if picture is not None:
        return (figure,)
    return ()


def _check_files(
    picture: Path | None, images: Path | None, original: Path | None, history: Path | None
) -> None:
    """Refuse a picture that could not be drawn, and files that are not there."""
    if picture is not None:
        check_picture(picture, "--picture")
    if images is not None:
        check_images(images, "images")
    if original is not None:
        check_weights_file(original, "original")
    if history is not None:
        check_weights_file(history, "history")


def _write(
    pictures: "Pictures",
    html: Path | None,
    picture: Path | None,
    figure: FigureName,
    *,
    force: bool,
) -> None:
    """Write the page, and draw the figure."""
    from ..views.page import page
    from ..views.plot import draw

    if html is not None:
        with new_file(html, force=force) as partial:
            partial.write_bytes(page(pictures).encode())
    if picture is not None:
        with new_file(picture, force=force) as partial:
            partial.write_bytes(draw(pictures, figure, picture.suffix))


def _show(inspection: "Inspection", outputs: list[Path]) -> None:
    """The inspection as a table, and the files that were written."""
    from ..views.inspection import inspection_view

    lines = []
    for path in outputs:
        lines.append(f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB).")
    if lines:
        lines = ["", *lines]
    console.show(inspection_view(inspection), *lines)
