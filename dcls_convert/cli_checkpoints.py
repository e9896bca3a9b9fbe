"""Commands on checkpoint folders: `dcls-convert verify` and `inspect`. Imports no torch by itself."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import CheckpointError

_Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that dcls-convert wrote.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def add_checkpoint_commands(app: typer.Typer) -> None:
    """Give the program its commands on checkpoint folders."""
    app.command("verify")(verify)
    app.command("inspect")(inspect)


def verify(checkpoint: _Checkpoint, json_: _Json = False) -> None:
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


def inspect(checkpoint: _Checkpoint, json_: _Json = False) -> None:
    """Show where a checkpoint's elements are: at the window's border, overlapping, how far from the centre."""
    from .inspection import inspect_folder

    found = inspect_folder(checkpoint)
    if json_:
        sys.stdout.write(found.to_json())
        return
    from rich.console import Console

    from .position_views import inspection_view

    Console(highlight=False).print(inspection_view(found))
