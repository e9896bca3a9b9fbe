"""The record of a training by a `PositionTracker`, read for the plan of a model."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..planning.layer_plan import position_groups
from ..planning.plan import ConversionPlan
from ..text import short_list
from ..tuning.tracker import TrackRecord, read_track


def read_history(path: Path, plan: ConversionPlan) -> tuple[TrackRecord, ...]:
    """Return the records of a training, in the order of the plan's positions.

    Raises:
        CheckpointError: The file has no records, or they are of another model.
    """
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    names = [first.position_names["positions"] for first, *_ in position_groups(plan.layers)]
    for record in records:
        if not _are_names_of(list(record.positions), names):
            raise CheckpointError(
                f"{path}: is a record of another model; it follows {short_list(record.positions)}, "
                f"the folder has {short_list(names)}"
            )
    return records


def _are_names_of(recorded: Sequence[str], names: Sequence[str]) -> bool:
    """True if the recorded names are these; a module around the network may add a prefix."""
    if len(recorded) != len(names):
        return False
    pairs = zip(recorded, names, strict=True)
    return all(f".{with_prefix}".endswith(f".{name}") for with_prefix, name in pairs)
