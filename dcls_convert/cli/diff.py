"""`dcls-convert diff`: what differs between two checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..input import check_folder
from ..text import count_text, shortened
from . import console
from .completion import complete_files
from .options import OUTPUT, CheckpointArgument, Json

if TYPE_CHECKING:
    from ..planning.plan import ConversionPlan, PlanDifference

EXIT_DIFFERENT = 1  # with --exit-code, as in git and diff
OtherCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="OTHER",
        help="A second folder that dcls-convert wrote.",
        callback=check_folder,
        autocompletion=complete_files,
        show_default=False,
    ),
]
ExitCode = Annotated[
    bool,
    typer.Option(
        "--exit-code",
        help=f"Exit with {EXIT_DIFFERENT} if plans or weights differ.",
        rich_help_panel=OUTPUT,
    ),
]


def diff(
    checkpoint: CheckpointArgument,
    other: OtherCheckpoint,
    exit_code: ExitCode = False,
    json_: Json = False,
) -> None:
    """Show how two checkpoints differ: their plans, layer by layer, and whether weights do."""
    with console.steps("diff", "reading", lines=False):
        from ..checkpoints.folder import open_checkpoint, read_tensors
        from ..records import write_json
        from ..weights.tensors_hash import tensors_hash

        first = open_checkpoint(checkpoint)
        second = open_checkpoint(other)
        differences = _differences(first.plan, second.plan)
        # Hash the weights themselves: the hash that a damaged folder states may be wrong.
        first_hash = tensors_hash(read_tensors(first.weights_path))
        second_hash = tensors_hash(read_tensors(second.weights_path))
        equal_weights = first_hash == second_hash
    if json_:
        data = {
            "format": 1,
            "differences": list(map(asdict, differences)),
            "equal_weights": equal_weights,
        }
        console.write(write_json(data))
    else:
        lines = [_line(difference) for difference in differences]
        if not lines:
            lines = ["plans: the same"]
        weights = "the same" if equal_weights else "different"
        console.show(*lines, f"weights: {weights}")
    if exit_code and (differences or not equal_weights):
        raise typer.Exit(EXIT_DIFFERENT)


def _differences(first: "ConversionPlan", second: "ConversionPlan") -> "list[PlanDifference]":
    """Return the differences of two plans, and of the costs of the models that they make."""
    from ..planning.plan import PlanDifference
    from ..reports.predict import predict_report

    differences = [*first.diff(second)]
    first_report = predict_report(first)
    second_report = predict_report(second)
    for cost in ("params", "macs"):
        first_cost = getattr(first_report, cost).after
        second_cost = getattr(second_report, cost).after
        if first_cost != second_cost:
            what = f"{cost} after conversion"
            differences.append(PlanDifference(what=what, one=first_cost, other=second_cost))
    return differences


def _line(difference: "PlanDifference") -> str:
    """Describe a difference in one line.

    An example: "dilated_size: 9x9 → 11x11 in 9 layers: stages.0.conv (and 8 more layers)".
    """
    layers = count_text(len(difference.layers), "layer")
    where = _where(difference.layers)
    if difference.what == "layers":
        folder = "first" if difference.one else "second"
        return f"{layers} only in the {folder}: {where}"
    if difference.what == "rules_text":
        line = "rules_text: differ"
    else:
        line = f"{difference.what}: {_value_text(difference.one)} → {_value_text(difference.other)}"
    if difference.layers:
        line += f" in {layers}: {where}"
    return line


def _where(layers: Sequence[str]) -> str:
    """Name the first layer, and say how many more there are."""
    if not layers:
        return ""
    if len(layers) == 1:
        return shortened(layers[0])
    return f"{shortened(layers[0])} (and {count_text(len(layers) - 1, 'more layer')})"


def _value_text(value: Any) -> str:
    """Format a value of a plan: sizes as 9x9, integers with thousands separators."""
    if isinstance(value, list) and value and all(isinstance(side, int) for side in value):
        return "x".join(map(str, value))
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, str):
        return shortened(value, 60)
    return shortened(json.dumps(value), 60)
