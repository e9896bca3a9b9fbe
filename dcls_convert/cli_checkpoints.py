"""Commands that take a checkpoint folder. Imports no torch by itself."""

from pathlib import Path
from typing import Annotated

import typer

from .options import FoldFormat

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that dcls-convert wrote.")]


def fold(
    checkpoint: Checkpoint,
    format: Annotated[
        FoldFormat,
        typer.Option(help="timm: a folder, which timm loads by itself where its architecture allows; or one file."),
    ] = "timm",
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="[default: ./CHECKPOINT-folded, ./CHECKPOINT.onnx, ./CHECKPOINT.pt2]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that folder or file.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print the output's name alone.")] = False,
) -> None:
    """Turn a checkpoint's layers into plain convolutions, for use elsewhere.

    Positions are no longer learnable then; outputs stay the same, which is checked before anything is written.
    """
    from .commands_fold import run_fold

    run_fold(checkpoint, format, output, force=force, as_json=json_, quiet=quiet)
