"""`dcls-convert diff`: what differs between two checkpoints."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from ..files import check_folder
from . import console
from .arguments import Checkpoint, Json, checkpoint_argument


def diff(
    checkpoint: Checkpoint,
    other: Annotated[Path, checkpoint_argument("OTHER", "Another such folder.")],
    json_: Json = False,
) -> None:
    """Show what differs between two checkpoints: their plans, layer by layer, and whether their weights are equal."""
    for folder in (checkpoint, other):
        check_folder(folder)
    with console.steps("diff", lines=False) as notify:
        notify("reading")  # which begins with imports of some seconds
        from ..checkpoints.folder import WEIGHTS, read_plan
        from ..checkpoints.stamp import read_tensors, tensors_hash
        from ..records import write_json
        from ..views.diff import difference_line

        differences = read_plan(checkpoint).diff(read_plan(other))
        # What the files hold, not what folders state of them: one may be damaged.
        one, two = (tensors_hash(read_tensors(folder / WEIGHTS)) for folder in (checkpoint, other))
    if json_:
        rows = [asdict(difference) for difference in differences]
        console.write(write_json({"format": 1, "differences": rows, "equal_weights": one == two}))
        return
    lines = [*map(difference_line, differences)] or ["plans: the same"]
    console.show(*lines, f"weights: {'the same' if one == two else 'other values'}")
