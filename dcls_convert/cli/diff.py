"""`dcls-convert diff`: what differs between two checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import shown
from ..tables import counted
from . import console
from .arguments import Checkpoint, Json, checkpoint_argument

if TYPE_CHECKING:
    from ..planning.plan import Difference


def diff(
    checkpoint: Checkpoint,
    other: Annotated[Path, checkpoint_argument("OTHER", "Another such folder.")],
    json_: Json = False,
) -> None:
    """Show what differs between two checkpoints: their plans, layer by layer, and whether their weights are equal."""
    with console.steps("diff", "reading", lines=False):
        from ..checkpoints.folder import WEIGHTS, read_plan, read_tensors, tensors_hash
        from ..planning.plan import Difference
        from ..records import write_json
        from ..reports.report import predict_report

        first_plan = read_plan(checkpoint)
        second_plan = read_plan(other)
        first_report = predict_report(first_plan)
        second_report = predict_report(second_plan)
        differences = [*first_plan.diff(second_plan)]
        for cost in ("params", "macs"):
            first = getattr(first_report, cost).after
            second = getattr(second_report, cost).after
            if first != second:
                difference = Difference(what=f"{cost} after conversion", one=first, other=second)
                differences.append(difference)
        # A folder may state another hash than that of its weights, if one of them is damaged.
        first_hash = tensors_hash(read_tensors(checkpoint / WEIGHTS))
        second_hash = tensors_hash(read_tensors(other / WEIGHTS))
        equal_weights = first_hash == second_hash
    if json_:
        rows = [asdict(difference) for difference in differences]
        console.write(
            write_json({"format": 1, "differences": rows, "equal_weights": equal_weights})
        )
        return
    lines = [_line(difference) for difference in differences]
    if not lines:
        lines = ["plans: the same"]
    weights = "the same" if equal_weights else "other values"
    console.show(*lines, f"weights: {weights}")


def _line(difference: "Difference") -> str:
    """ "dilated_size: 9x9 → 11x11 in 9 layers: stages.0.blocks.0.conv_dw (8 more like it)"."""
    layers = counted(len(difference.layers), "layer")
    where = _where(difference.layers)
    if difference.what == "layers":
        folder = "first" if difference.one else "second"
        return f"{layers} only in the {folder}: {where}"
    if difference.what == "rules_text":
        line = "rules_text: differ"
    else:
        line = f"{difference.what}: {_text(difference.one)} → {_text(difference.other)}"
    if difference.layers:
        line += f" in {layers}: {where}"
    return line


def _where(layers: Sequence[str]) -> str:
    """The first layer, and how many more there are."""
    if not layers:
        return ""
    if len(layers) == 1:
        return shown(layers[0])
    return f"{shown(layers[0])} ({len(layers) - 1:,} more like it)"


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(side, int) for side in value):
        return "x".join(map(str, value))
    if type(value) is int:
        return f"{value:,}"
    text = value if isinstance(value, str) else json.dumps(value)
    return shown(text, 60)
