"""`dcls-convert inspect`: where a checkpoint's elements are."""

from pathlib import Path
from typing import Annotated, Any, get_args

from ..files import check_images, check_picture, check_weights_file
from ..options import FigureName
from ..output import check_output, new_file, not_a_file
from . import console
from .arguments import (
    OUTPUT,
    Checkpoint,
    Force,
    Json,
    TrustCode,
    choice,
    image_size,
    option,
    refuse,
)

PICTURES = "Pictures"  # a group of --help
HTML_HELP = "Write a page of pictures: positions, kernels, effective receptive field, cost."
PICTURE_HELP = "Draw one figure into a .png, .svg or .pdf (extra plot)."
HISTORY = option(PICTURES, "What a PositionTracker wrote in training.", metavar="positions.jsonl")
FIELD = "for the effective receptive field"
IMAGES = option(PICTURES, f"Images {FIELD}.", metavar="FOLDER", show_default="seeded noise")
ORIGINAL = option(
    PICTURES, "Weights of the network before conversion, to compare with.", metavar="FILE"
)


def inspect(
    checkpoint: Checkpoint,
    json_: Json = False,
    plan: Annotated[
        bool, option(OUTPUT, "Print the checkpoint's plan as JSON instead.", "--plan")
    ] = False,
    html: Annotated[Path | None, option(PICTURES, HTML_HELP, metavar="FILE")] = None,
    picture: Annotated[Path | None, option(PICTURES, PICTURE_HELP, metavar="FILE")] = None,
    figure: Annotated[
        FigureName, choice(FigureName, PICTURES, "Which one --picture draws.")
    ] = "positions",
    history: Annotated[Path | None, HISTORY] = None,
    images: Annotated[Path | None, IMAGES] = None,
    original: Annotated[Path | None, ORIGINAL] = None,
    input_size: Annotated[
        Any, image_size(PICTURES, f"Image size {FIELD}; the paper's is 3x1024x1024.")
    ] = None,
    force: Force = False,
    trust_code: TrustCode = False,
) -> None:
    """Show where a checkpoint's elements are: at the window's border, overlapping, how far from the centre."""
    outputs = [path for path in (html, picture) if path is not None]
    drawn: tuple[str, ...] = ()
    if html is not None:
        drawn = get_args(FigureName)
    elif picture is not None:
        drawn = (figure,)
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
    if picture is not None:
        check_picture(picture, "--picture")
    if images is not None:
        check_images(images, "images")
    for path, what in ((original, "original"), (history, "history")):
        if path is not None:
            check_weights_file(path, what)
    for path in outputs:
        check_output(path, force=force, foreign=not_a_file)
    with console.steps(checkpoint, "reading", lines=bool(outputs)) as notify:
        from ..checkpoints.folder import read_plan
        from ..checkpoints.inspection import inspect_folder
        from ..views.inspection import inspection_view

        if outputs:
            from ..views.page import page, pictures_of_folder
            from ..views.plot import draw
            from ..views.receptive_field import FieldOptions

            fields = None
            if "receptive-field" in drawn:
                fields = FieldOptions(images, original, input_size)
            pictures = pictures_of_folder(
                checkpoint, fields, history, notify, console.note, trust_code=trust_code
            )
            inspection = pictures.inspection
            notify("writing")
            for path in outputs:
                with new_file(path, force=force) as partial:
                    if path is html:
                        content = page(pictures).encode()
                    else:
                        content = draw(pictures, figure, path.suffix)
                    partial.write_bytes(content)
        elif not plan:
            inspection = inspect_folder(checkpoint)
    if plan:
        console.write(read_plan(checkpoint).to_json())
    elif json_:
        console.write(inspection.to_json())
    else:
        lines = [f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB)." for path in outputs]
        if lines:
            lines = ["", *lines]
        console.show(inspection_view(inspection), *lines)
