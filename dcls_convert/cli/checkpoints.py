"""Commands on checkpoint folders: `dcls-convert inspect`, `fold` and `verify`. Imports no torch by itself."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckpointError
from ..options import FoldFormat

_Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that dcls-convert wrote.")]
_Trust = Annotated[
    bool, typer.Option("--trust-code", help="Run the Python code that the checkpoint names as its model.")
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def add_checkpoint_commands(app: typer.Typer) -> None:
    """Give the program its commands on checkpoint folders."""
    app.command("verify")(verify)
    app.command("inspect")(inspect)
    app.command("fold")(fold)


def verify(checkpoint: _Checkpoint, trust_code: _Trust = False, json_: _Json = False) -> None:
    """Check a checkpoint: files, hashes, and that it rebuilds in a fresh process with the same outputs."""
    from ..checkpoints.verify import verify_folder

    found = verify_folder(checkpoint, trust_code=trust_code)
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
    from ..checkpoints.inspection import inspect_folder

    found = inspect_folder(checkpoint)
    if json_:
        sys.stdout.write(found.to_json())
        return
    from rich.console import Console

    from .inspection_view import inspection_view

    Console(highlight=False).print(inspection_view(found))


def fold(
    checkpoint: _Checkpoint,
    format: Annotated[
        FoldFormat,
        typer.Option(help="timm: a folder, which timm loads by itself where its architecture allows; or one file."),
    ] = "timm",
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="[default: ./CHECKPOINT-folded, ./CHECKPOINT.onnx, ./CHECKPOINT.pt2]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that folder or file.")] = False,
    trust_code: _Trust = False,
    json_: _Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print the output's name alone.")] = False,
) -> None:
    """Turn a checkpoint's layers into plain convolutions, for use elsewhere.

    Positions are no longer learnable then; outputs stay the same, which is checked before anything is written.
    """
    from .fold import run_fold

    run_fold(checkpoint, format, output, force=force, trust_code=trust_code, as_json=json_, quiet=quiet)
