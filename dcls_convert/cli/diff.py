"""`dcls-convert diff`: what differs between two checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import shown
from . import console
from .arguments import Checkpoint, Json

if TYPE_CHECKING:
    from ..planning.plan import Difference


def diff(
    checkpoint: Checkpoint,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another such folder.")],
    json_: Json = False,
) -> None:
    """Show what differs between two checkpoints: their plans, layer by layer, and whether their weights are equal."""
    from ..checkpoints.folder import read_folder, the_plan

    one, two = (read_folder(folder) for folder in (checkpoint, other))
    found = the_plan(one, checkpoint).diff(the_plan(two, other))
    equal = None if None in (one.tensors, two.tensors) else one.tensors == two.tensors
    if json_:
        rows = [asdict(difference) for difference in found]
        console.write(json.dumps({"format": 1, "differences": rows, "equal_weights": equal}, indent=2) + "\n")
        return
    weights = {True: "the same", False: "other values", None: "not known, since a folder does not state their hash"}
    console.show(*map(_line, found), *([] if found else ["plans: the same"]), f"weights: {weights[equal]}")


def _line(difference: "Difference") -> str:
    from ..reports.report_view import counted

    what, names = difference.what, difference.layers
    where = shown(names[0]) + (f" ({len(names) - 1:,} more like it)" if len(names) > 1 else "") if names else ""
    if what == "layers":
        return f"{counted(len(names), 'layer')} only in the {'first' if difference.one else 'second'}: {where}"
    changed = "differ" if what == "rules_text" else f"{_text(difference.one)} → {_text(difference.other)}"
    return f"{what}: {changed}" + (f" in {counted(len(names), 'layer')}: {where}" if names else "")


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(side, int) for side in value):
        return "x".join(map(str, value))
    return shown(value if isinstance(value, str) else json.dumps(value), 60)
