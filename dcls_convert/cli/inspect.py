"""`dcls-convert inspect`: show where a converted network's elements are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cli import console, options
from ..errors import DclsConvertError
from ..file_checks import check_file
from ..options import PICTURE_WIDTH

if TYPE_CHECKING:
    from ..views.history import Training

PICTURES = "Pictures"  # a group of options in --help

PlanAsJson = Annotated[
    bool,
    options.output_option(
        "--plan",
        metavar="",
        help="Print the folder's plan as JSON instead.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw positions and kernels into a .png, .svg or .pdf (extra plot).",
        rich_help_panel=PICTURES,
    ),
]
Width = Annotated[
    float | None,
    typer.Option(
        metavar="INCHES",
        min=3,
        max=20,
        help=f"Width of the picture (default: {PICTURE_WIDTH}; a column of a paper: 3.3).",
        rich_help_panel=PICTURES,
    ),
]
History = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="positions.jsonl",
        help="File that a PositionTracker wrote during training; its curves are added to the "
        "picture. Repeat it to compare trainings.",
        rich_help_panel=PICTURES,
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(
        "--since",
        metavar="FOLDER",
        help="The folder from which training started; shows how far elements have moved since.",
    ),
]


def inspect(
    folder: options.FolderArgument,
    since: Start = None,
    json_: options.Json = False,
    plan: PlanAsJson = False,
    picture: Picture = None,
    width: Width = None,
    history: History = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where a network's elements are: at the border, overlapping, far from the centre."""
    if plan and (since or history or picture is not None):
        raise DclsConvertError(
            "--plan prints the plan alone; omit --since, --history and --picture"
        )
    if picture is None and (history or width is not None):
        raise DclsConvertError("--history and --width need a file to draw: add --picture FILE.png")
    from ..checkpoints.folder import open_folder
    from ..output import check_output_path, check_picture, new_output, why_not_a_file

    if plan:
        console.write(open_folder(folder).plan.to_json())
        return
    for path in history or ():
        check_file(path, "history")
    if picture is not None:
        check_picture(picture)
        check_output_path(picture, force=force, why_keep=why_not_a_file)
    with console.steps(folder, "reading", quiet=quiet) as notify:
        from ..checkpoints.inspection import inspect_state, plan_with_positions
        from ..checkpoints.stored_weights import read_state
        from ..views.inspection import inspection_view

        opened = open_folder(folder)
        trainings: Sequence[Training] = ()
        if history:
            from ..views.history import read_trainings

            trainings = read_trainings(history, plan_with_positions(opened))
        state = read_state(opened)
        start = None if since is None else open_folder(since)
        inspection = inspect_state(opened, state, start)
        if picture is not None:
            from ..views.plot import draw

            notify("drawing")
            with new_output(picture, force=force, why_keep=why_not_a_file) as partial:
                partial.write_bytes(
                    draw(opened.plan, state, picture.suffix, trainings, width or PICTURE_WIDTH)
                )
    if json_:
        console.write(inspection.to_json())
    elif quiet:
        if picture is not None:
            console.write(f"{picture}\n")
    else:
        console.show(inspection_view(inspection))
        if picture is not None:
            console.show("", f"Wrote {picture} ({picture.stat().st_size / 1e6:.2f} MB).")
