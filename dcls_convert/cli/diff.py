"""`dcls-convert diff`: what differs between two checkpoints."""

import json
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

        plans = [read_plan(folder) for folder in (checkpoint, other)]
        differences = [*plans[0].diff(plans[1])]
        for name in ("params", "macs"):
            one, two = (getattr(predict_report(plan), name).after for plan in plans)
            differences += [Difference(what=f"{name} after conversion", one=one, other=two)] * (
                one != two
            )
        # What the files hold, not what folders state of them: one may be damaged.
        one, two = (tensors_hash(read_tensors(folder / WEIGHTS)) for folder in (checkpoint, other))
    if json_:
        rows = [asdict(difference) for difference in differences]
        console.write(write_json({"format": 1, "differences": rows, "equal_weights": one == two}))
        return
    lines = [*map(_line, differences)] or ["plans: the same"]
    console.show(*lines, f"weights: {'the same' if one == two else 'other values'}")


def _line(difference: "Difference") -> str:
    """ "dilated_size: 9x9 → 11x11 in 9 layers: stages.0.blocks.0.conv_dw (8 more like it)"."""
    what, names = difference.what, difference.layers
    where = (
        shown(names[0]) + (f" ({len(names) - 1:,} more like it)" if len(names) > 1 else "")
        if names
        else ""
    )
    if what == "layers":
        return f"{counted(len(names), 'layer')} only in the {'first' if difference.one else 'second'}: {where}"
    changed = (
        "differ" if what == "rules_text" else f"{_text(difference.one)} → {_text(difference.other)}"
    )
    return f"{what}: {changed}" + (f" in {counted(len(names), 'layer')}: {where}" if names else "")


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(side, int) for side in value):
        return "x".join(map(str, value))
    if type(value) is int:
        return f"{value:,}"
    return shown(value if isinstance(value, str) else json.dumps(value), 60)
