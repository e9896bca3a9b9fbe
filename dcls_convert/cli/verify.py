"""`dcls-convert verify`: check that a folder is complete and undamaged."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from ..cli import console, options
from ..errors import CheckpointError
from ..text import count_text, printable

if TYPE_CHECKING:
    from ..checkpoints.verify import Check

EXIT_NOT_CHECKED = 4  # no problem was found, but the model was not rebuilt
MODEL_NOT_CHECKED = (
    "its model was not checked; name the unconverted network: --model package.module:factory, "
    "in Python model=NETWORK"
)
MARKS = {True: ("ok", "green"), False: ("problem", "red"), None: ("skipped", "yellow")}


def verify(
    folder: options.FolderArgument,
    model: options.Unconverted = None,
    trust_code: options.TrustCode = False,
    json_: options.Json = False,
) -> None:
    """Check a folder: rebuild its network, and compare names, shapes, hash and outputs.

    If only your own code can build the network, name it with --model; else the exit code is 4.
    """
    with console.steps(folder, "reading") as notify:
        from ..checkpoints.verify import verify_folder
        from ..networks.building import build_model
        from ..networks.source import resolve_model

        unconverted = None
        if model is not None:
            unconverted = build_model(resolve_model(model), trust_code=True)
        verification = verify_folder(
            folder, model=unconverted, trust_code=trust_code, notify=notify
        )
    if json_:
        console.write(verification.to_json())
    else:
        _show(verification.checks)
    if verification.ok is None:
        console.error(f"{folder}: {MODEL_NOT_CHECKED}")
        raise typer.Exit(EXIT_NOT_CHECKED)
    if not verification.ok:
        problems = sum(check.ok is False for check in verification.checks)
        console.error(f"{folder}: {count_text(problems, 'problem')} found")
        raise typer.Exit(CheckpointError.exit_code)


def _show(checks: "Sequence[Check]") -> None:
    """Print a line for every check."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, colour = MARKS[check.ok]
        text = f"  {check.name:{width}}  {printable(check.detail)}"
        console.show(Text.assemble((f"{mark:7}", colour), text))
