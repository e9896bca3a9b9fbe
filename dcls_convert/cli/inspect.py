"""`dcls-convert inspect`: where a checkpoint's elements are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ..errors import refuse
from ..input import check_file
from ..options import FigureName
from ..output import (
    PAGE_LIBRARY,
    check_installed,
    check_output,
    check_picture,
    new_file,
    reason_not_a_file,
)
from . import console
from .options import OUTPUT, CheckpointArgument, Force, Json, Quiet, TrustCode

if TYPE_CHECKING:
    from ..views.pictures import Pictures

PICTURES = "Pictures"  # a group of options in --help

PlanAsJson = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Print the checkpoint's plan as JSON instead.",
        rich_help_panel=OUTPUT,
    ),
]
Page = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a page of pictures: positions, distances, kernels (extra plot).",
        rich_help_panel=PICTURES,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw one figure into a .png, .svg or .pdf (extra plot).",
        rich_help_panel=PICTURES,
    ),
]
Figure = Annotated[
    FigureName | None,
    typer.Option(
        metavar="NAME",
        help=f"Which figure --picture draws: {', '.join(get_args(FigureName))} "
        "(default: positions).",
        rich_help_panel=PICTURES,
    ),
]
History = Annotated[
    Path | None,
    typer.Option(
        metavar="positions.jsonl",
        help="Record that a PositionTracker wrote in training: printed, and drawn by --html.",
        rich_help_panel=PICTURES,
    ),
]


def inspect(
    checkpoint: CheckpointArgument,
    json_: Json = False,
    plan: PlanAsJson = False,
    html: Page = None,
    picture: Picture = None,
    figure: Figure = None,
    history: History = None,
    force: Force = False,
    quiet: Quiet = False,
    trust_code: TrustCode = False,
) -> None:
    """Show where a checkpoint's elements are: at the border, overlapping, far from the centre."""
    outputs = [path for path in (html, picture) if path is not None]
    draws_history = html is not None or figure == "history"
    refuse(
        (plan and json_, "--plan and --json exclude each other; the plan is JSON"),
        (plan and outputs, "--plan prints the plan alone; omit --html and --picture"),
        (force and not outputs, "--force has no effect without --html or --picture"),
        (quiet and not outputs, "--quiet would print nothing; it is for --html and --picture"),
        (quiet and json_, "--quiet and --json exclude each other"),
        (
            figure is not None and picture is None,
            f"--figure {figure} needs a file to draw it into: add --picture FILE.png",
        ),
        (figure == "history" and history is None, "--figure history needs --history"),
        (
            history is not None and not draws_history and (plan or json_),
            "--history is printed as text; omit --plan and --json",
        ),
    )
    _check_files(html=html, picture=picture, history=history, force=force)
    if plan:
        _print_plan(checkpoint)
        return
    with console.steps(checkpoint, "reading", quiet=quiet, lines=bool(outputs)) as notify:
        from ..checkpoints.folder import open_checkpoint
        from ..checkpoints.inspection import inspect_checkpoint, plan_with_positions
        from ..views.history import history_view, read_checkpoint_history
        from ..views.inspection import inspection_view
        from ..views.pictures import pictures_of_folder

        opened = open_checkpoint(checkpoint)
        recorded = None
        if history is not None:
            recorded = read_checkpoint_history(history, plan_with_positions(opened))
        if outputs:
            pictures = pictures_of_folder(opened, recorded, notify, trust_code=trust_code)
            notify("writing")
            _write_files(pictures, html, picture, figure or "positions", force=force)
            inspection = pictures.inspection
        else:
            inspection = inspect_checkpoint(opened)
    if quiet:
        for path in outputs:
            console.show_path(path)
    elif json_:
        console.write(inspection.to_json())
    else:
        console.show(inspection_view(inspection))
        if recorded is not None:
            console.show("", history_view(recorded))
        for path in outputs:
            console.show("", f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB).")


def _print_plan(checkpoint: Path) -> None:
    with console.steps(checkpoint, "reading", lines=False):
        from ..checkpoints.folder import open_checkpoint

        text = open_checkpoint(checkpoint).plan.to_json()
    console.write(text)


def _check_files(
    *, html: Path | None, picture: Path | None, history: Path | None, force: bool
) -> None:
    """Refuse a record that is missing, and outputs that exist or cannot be drawn."""
    if history is not None:
        check_file(history, "history")
    if html is not None:
        check_installed("--html", PAGE_LIBRARY)
        check_output(html, force=force, reason_to_keep=reason_not_a_file)
    if picture is not None:
        check_picture(picture, "--picture")
        check_output(picture, force=force, reason_to_keep=reason_not_a_file)


def _write_files(
    pictures: "Pictures",
    html: Path | None,
    picture: Path | None,
    figure: FigureName,
    *,
    force: bool,
) -> None:
    """Write the page, and the figure."""
    from ..views.page import page
    from ..views.plot import draw

    if html is not None:
        with new_file(html, force=force) as partial:
            partial.write_text(page(pictures), encoding="utf-8")
    if picture is not None:
        with new_file(picture, force=force) as partial:
            partial.write_bytes(draw(pictures, figure, picture.suffix))
