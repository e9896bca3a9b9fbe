"""How positions moved in training, from what a `PositionTracker` wrote."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckpointError, shown
from ..tuning.tracker import TrackedPositions, TrackRecord, read_track

Curve = tuple[float | None, ...]  # a value for each step; None where it is not known
MOST_NUMBERS = 120_000  # coordinates of the moving pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackPicture:
    """One positions tensor through a training."""

    name: str
    size: tuple[int, ...]  # cells of the window along the learnt axes
    speed: Curve  # cells for a step
    spread: Curve  # cells; root mean square over the axes
    border: Curve  # share of the elements
    frames: tuple[tuple[Curve, ...], ...]  # at each of `moving_steps`, the followed elements along each learnt axis
    histograms: tuple[tuple[tuple[int, ...], ...], ...]  # along each axis, at each of `moving_steps`, elements in bins


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPicture:
    """All of a record."""

    steps: tuple[int, ...]
    moving_steps: tuple[int, ...]  # a part of them where they are many
    tracks: tuple[TrackPicture, ...]


def read_history(path: str | os.PathLike[str]) -> HistoryPicture:
    """The curves and moving positions of a `positions.jsonl`.

    Raises:
        CheckpointError: There is no such file, it is no record, it is empty, or it is of several models.
    """
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    first = records[0]
    for record in records:
        if _form(record) != _form(first):
            raise CheckpointError(f"{path}: the records of steps {first.step} and {record.step} differ in tensors")
        if not all(0 < axis.width <= 1 and axis.counts for row in record.positions for axis in row.histograms):
            raise CheckpointError(f"{path}: the histograms of step {record.step} have bins that are no part of a cell")
    tracks = [*zip(*(record.positions for record in records), strict=True)]
    for rows in tracks:
        if len({tuple(map(len, row.followed)) for row in rows if row.followed}) > 1:
            raise CheckpointError(f"{path}: the records follow several numbers of elements of {shown(rows[0].name)}")
    moving = _chosen(records)
    return HistoryPicture(
        steps=tuple(record.step for record in records),
        moving_steps=tuple(records[index].step for index in moving),
        tracks=tuple(_track(rows, [rows[index] for index in moving]) for rows in tracks),
    )


def _form(record: TrackRecord) -> list[tuple[str, list[int]]]:
    """Of each tensor its name, and how many bins there are along each axis."""
    return [(row.name, [len(axis.counts) for axis in row.histograms]) for row in record.positions]


def _chosen(records: Sequence[TrackRecord]) -> list[int]:
    """Evenly spaced records, with the first and the last, whose coordinates are not too many."""
    numbers = sum(
        sum(map(len, row.followed)) + sum(len(axis.counts) for axis in row.histograms) for row in records[0].positions
    )
    last = len(records) - 1
    most = min(max(2, MOST_NUMBERS // max(numbers, 1)), len(records))
    return [round(index * last / max(most - 1, 1)) for index in range(most)]


def _track(rows: Sequence[TrackedPositions], moving: Sequence[TrackedPositions]) -> TrackPicture:
    return TrackPicture(
        name=rows[0].name,
        size=tuple(round(len(axis.counts) * axis.width) for axis in rows[0].histograms),
        speed=tuple(row.speed for row in rows),
        spread=tuple(_root_mean_square(row.spread) for row in rows),
        border=tuple(row.border_share for row in rows),
        frames=tuple(row.followed for row in moving),
        histograms=tuple(zip(*([axis.counts for axis in row.histograms] for row in moving), strict=True)),
    )


def _root_mean_square(sides: Curve) -> float | None:
    known = [side for side in sides if side is not None]
    return math.sqrt(sum(side**2 for side in known) / len(known)) if known and len(known) == len(sides) else None
