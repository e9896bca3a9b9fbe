"""`dcls-convert inspect`: where a checkpoint's elements are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DclsConvertError
from ..input import check_file
from ..output import check_output, check_picture, new_output, reason_not_a_file
from ..progress import Notify
from . import console, options

if TYPE_CHECKING:
    from ..checkpoints.folder import Checkpoint
    from ..checkpoints.inspection import Inspection
    from ..tuning.tracker import TrackRecord

PICTURES = "Pictures"  # a group of options in --help

PlanAsJson = Annotated[
    bool,
    typer.Option(
        "--plan",
        metavar="",
        help="Print the checkpoint's plan as JSON instead.",
        rich_help_panel=options.OUTPUT,
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
History = Annotated[
    Path | None,
    typer.Option(
        metavar="positions.jsonl",
        help="Record that a PositionTracker wrote in training: drawn into the picture, too.",
        rich_help_panel=PICTURES,
    ),
]


def inspect(
    checkpoint: options.CheckpointArgument,
    json_: options.Json = False,
    plan: PlanAsJson = False,
    picture: Picture = None,
    history: History = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where a checkpoint's elements are: at the border, overlapping, far from the centre."""
    if plan and picture is not None:
        raise DclsConvertError("--plan prints the plan alone; omit --picture")
    if history is not None and picture is None:
        raise DclsConvertError("--history needs a file to draw it into: add --picture FILE.png")
    if history is not None:
        check_file(history, "history")
    if picture is not None:
        check_picture(picture)
        check_output(picture, force=force, reason_to_keep=reason_not_a_file)
    if plan:
        _print_plan(checkpoint)
        return
    with console.steps(checkpoint, "reading", quiet=quiet, lines=picture is not None) as notify:
        from ..checkpoints.folder import open_checkpoint
        from ..checkpoints.inspection import inspect_checkpoint
        from ..views.inspection import inspection_view

        opened = open_checkpoint(checkpoint)
        if picture is None:
            inspection = inspect_checkpoint(opened)
        else:
            inspection = _draw(opened, picture, history, force=force, notify=notify)
    if json_:
        console.write(inspection.to_json())
    elif quiet:
        if picture is not None:
            console.show_path(picture)
    else:
        console.show(inspection_view(inspection))
        if picture is not None:
            console.show("", f"Wrote {picture} ({picture.stat().st_size / 1e6:.2f} MB).")


def _draw(
    checkpoint: "Checkpoint", picture: Path, history: Path | None, *, force: bool, notify: Notify
) -> "Inspection":
    """Inspect a checkpoint, and draw its figure."""
    from ..checkpoints.inspection import inspect_state, plan_with_positions
    from ..views.history import read_history
    from ..views.plot import draw

    plan = plan_with_positions(checkpoint)
    records: Sequence[TrackRecord] = ()
    if history is not None:
        records = read_history(history, plan)
    state = checkpoint.read_state()
    inspection = inspect_state(checkpoint, state)
    notify("drawing")
    with new_output(picture, force=force, reason_to_keep=reason_not_a_file) as partial:
        partial.write_bytes(draw(plan, state, picture.suffix, records))
    return inspection


def _print_plan(checkpoint: Path) -> None:
    with console.steps(checkpoint, "reading", lines=False):
        from ..checkpoints.folder import open_checkpoint

        text = open_checkpoint(checkpoint).plan.to_json()
    console.write(text)
