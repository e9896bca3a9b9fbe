"""`dcls-convert inspect`: where a checkpoint's elements are."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import refuse
from ..output import check_output, check_picture, new_file, reason_not_a_file
from . import console
from .options import OUTPUT, CheckpointArgument, Force, Json, Quiet

PICTURES = "Pictures"  # a group of options in --help

PlanAsJson = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Print the checkpoint's plan as JSON instead.",
        rich_help_panel=OUTPUT,
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


def inspect(
    checkpoint: CheckpointArgument,
    json_: Json = False,
    plan: PlanAsJson = False,
    picture: Picture = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Show where a checkpoint's elements are: at the border, overlapping, far from the centre."""
    has_picture = picture is not None
    refuse(
        (plan and json_, "--plan and --json exclude each other; the plan is JSON"),
        (plan and has_picture, "--plan prints the plan alone; omit --picture"),
        (force and not has_picture, "--force has no effect without --picture"),
        (quiet and not has_picture, "--quiet would print nothing; it is for --picture"),
        (quiet and json_, "--quiet and --json exclude each other"),
    )
    if picture is not None:
        check_picture(picture)
        check_output(picture, force=force, reason_to_keep=reason_not_a_file)
    if plan:
        _print_plan(checkpoint)
        return
    with console.steps(checkpoint, "reading", quiet=quiet, lines=has_picture) as notify:
        from ..checkpoints.folder import open_checkpoint
        from ..checkpoints.inspection import inspect_checkpoint, inspect_state, plan_with_positions
        from ..views.inspection import inspection_view
        from ..views.plot import draw

        opened = open_checkpoint(checkpoint)
        positions_plan = plan_with_positions(opened)
        if picture is None:
            inspection = inspect_checkpoint(opened)
        else:
            state = opened.read_state()
            inspection = inspect_state(opened, state)
            notify("drawing")
            drawing = draw(positions_plan, state, picture.suffix)
            with new_file(picture, force=force) as partial:
                partial.write_bytes(drawing)
    if quiet:
        console.show_path(picture)
    elif json_:
        console.write(inspection.to_json())
    else:
        console.show(inspection_view(inspection))
        if picture is not None:
            console.show("", f"Wrote {picture} ({picture.stat().st_size / 1e6:.2f} MB).")


def _print_plan(checkpoint: Path) -> None:
    with console.steps(checkpoint, "reading", lines=False):
        from ..checkpoints.folder import open_checkpoint

        text = open_checkpoint(checkpoint).plan.to_json()
    console.write(text)
