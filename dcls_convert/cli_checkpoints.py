"""Commands that take a checkpoint folder. Imports no torch by itself."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import CheckpointError

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that dcls-convert wrote.")]


def verify(
    checkpoint: Checkpoint,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check a checkpoint: files, hashes, and that it rebuilds in a fresh process with the same outputs."""
    from .verification import verify_folder

    found = verify_folder(checkpoint)
    if json_:
        sys.stdout.write(found.to_json())
    else:
        width = max(len(check.name) for check in found.checks)
        marks = {True: ("ok", "green"), False: ("problem", "red"), None: ("skipped", "yellow")}
        for check in found.checks:
            mark, colour = marks[check.ok]
            typer.echo(f"{typer.style(f'{mark:7}', fg=colour)}  {check.name:{width}}  {check.detail}")
    if not found.ok:
        count = len(found.problems)
        raise CheckpointError(f"{checkpoint}: {count} problem{'s' * (count > 1)} found")


def inspect(
    checkpoint: Checkpoint,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show where a checkpoint's elements are: at the window's border, overlapping, how far from the centre."""
    from .inspection import inspect_folder

    found = inspect_folder(checkpoint)
    if json_:
        sys.stdout.write(found.to_json())
        return
    from rich.console import Console

    from .position_views import inspection_view

    Console(highlight=False).print(inspection_view(found))
