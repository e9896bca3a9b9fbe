"""Read the records that a `PositionTracker` wrote during the training of a plan's model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..planning.layer_plan import position_groups
from ..planning.plan import ConversionPlan
from ..text import short_list
from ..tuning.tracker import TrackRecord, Unit, read_track


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The records of one training, with a name that tells it from the other trainings."""

    name: str
    records: tuple[TrackRecord, ...]  # at least one; positions are in the order of the plan's

    @property
    def unit(self) -> Unit:
        """What `steps` count."""
        return self.records[0].unit

    @property
    def steps(self) -> list[int]:
        """The numbers of the records."""
        return [record.step for record in self.records]

    def values(self, field: str) -> Tensor:
        """Return a field of `TrackedPositions` (records, tensors); nan where unknown."""
        rows = []
        for record in self.records:
            values = [getattr(row, field) for row in record.positions.values()]
            rows.append([math.nan if value is None else value for value in values])
        return torch.tensor(rows, dtype=torch.float64)


def read_trainings(paths: Sequence[Path], plan: ConversionPlan) -> tuple[Training, ...]:
    """Read the files of trackers; trainings are named by what differs in their paths.

    Raises:
        CheckpointError: A file has no records or belongs to another model, or files count different
            units.
    """
    trainings: list[Training] = []
    for path, name in zip(paths, _names_of(paths), strict=True):
        training = Training(name=name, records=_read_history(path, plan))
        if trainings and training.unit != trainings[0].unit:
            raise CheckpointError(
                f"{path}: counts {training.unit}s, {paths[0]} {trainings[0].unit}s; draw them in "
                "two pictures"
            )
        trainings.append(training)
    return tuple(trainings)


def _names_of(paths: Sequence[Path]) -> list[str]:
    """Return the paths without the parts that all share at the start or at the end."""
    parts = [list(Path(str(path.absolute()).removesuffix(".jsonl")).parts) for path in paths]
    for end in (-1, 0):
        while min(map(len, parts)) > 1 and len({path[end] for path in parts}) == 1:
            for path in parts:
                path.pop(end)
    return ["/".join(path) for path in parts]


def _read_history(path: Path, plan: ConversionPlan) -> tuple[TrackRecord, ...]:
    """Return the records of a training."""
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
    """True if the names are the same, apart from a prefix that a module around the network adds."""
    if len(recorded) != len(names):
        return False
    pairs = zip(recorded, names, strict=True)
    return all(f".{with_prefix}".endswith(f".{name}") for with_prefix, name in pairs)
