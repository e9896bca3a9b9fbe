"""How positions moved in training, from what a `PositionTracker` wrote."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CheckpointError, shown
from ..tuning.tracker import TrackedPositions, TrackRecord, read_track

Curve = tuple[float | None, ...]  # a value for each step; None where it is not known
MOST_FRAME_NUMBERS = 120_000  # coordinates and counts of all moving pictures together


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackPicture:
    """One positions tensor through a training."""

    name: str
    size: tuple[int, ...]  # cells of the window along the learnt axes
    speed: Curve  # cells for a step
    spread: Curve  # cells; root mean square over the axes
    border: Curve  # share of the elements
    # At each of `moving_steps`, coordinates of the followed elements along each learnt axis.
    frames: tuple[tuple[Curve, ...], ...]
    # Along each axis, at each of `moving_steps`, the number of elements in each bin.
    histograms: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPicture:
    """All of a record."""

    steps: tuple[int, ...]
    moving_steps: tuple[int, ...]  # those that the moving pictures show
    tracks: tuple[TrackPicture, ...]


def read_history(path: str | os.PathLike[str]) -> HistoryPicture:
    """The curves and moving positions of a `positions.jsonl`.

    Raises:
        CheckpointError: The file is not such a record, or is one of several models.
    """
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    first = records[0]
    for record in records:
        if _form(record) != _form(first):
            steps = f"{first.step} and {record.step}"
            raise CheckpointError(f"{path}: the records of steps {steps} differ in tensors")
    moving = _moving_records(records)
    tracks = []
    for index, row in enumerate(first.positions):
        rows = [record.positions[index] for record in records]
        moving_rows = [record.positions[index] for record in moving]
        if len(set(map(_followed_counts, rows))) > 1:
            raise CheckpointError(
                f"{path}: the records follow several numbers of elements of {shown(row.name)}"
            )
        tracks.append(_track_picture(rows, moving_rows))
    return HistoryPicture(
        steps=tuple(record.step for record in records),
        moving_steps=tuple(record.step for record in moving),
        tracks=tuple(tracks),
    )


def _form(record: TrackRecord) -> list[tuple[str, list[int]]]:
    """The name of each positions tensor, and its number of bins along each axis."""
    return [(row.name, list(map(len, row.histograms))) for row in record.positions]


def _followed_counts(row: TrackedPositions) -> tuple[int, ...]:
    """How many elements are followed along each axis."""
    return tuple(map(len, row.followed))


def _moving_records(records: Sequence[TrackRecord]) -> list[TrackRecord]:
    """Evenly spaced records, the first and the last included, of MOST_FRAME_NUMBERS numbers."""
    numbers = 0  # in one record
    for row in records[0].positions:
        numbers += sum(_followed_counts(row)) + sum(map(len, row.histograms))
    most = max(2, MOST_FRAME_NUMBERS // max(numbers, 1))
    if len(records) <= most:
        return list(records)
    last = len(records) - 1
    return [records[round(index * last / (most - 1))] for index in range(most)]


def _track_picture(
    rows: Sequence[TrackedPositions], moving_rows: Sequence[TrackedPositions]
) -> TrackPicture:
    """The picture of one positions tensor, whose rows are those of all records."""
    histograms = zip(*(row.histograms for row in moving_rows), strict=True)
    return TrackPicture(
        name=rows[0].name,
        size=tuple(map(len, rows[0].histograms)),
        speed=tuple(row.speed for row in rows),
        spread=tuple(_root_mean_square(row.spread) for row in rows),
        border=tuple(row.border_share for row in rows),
        frames=tuple(row.followed for row in moving_rows),
        histograms=tuple(histograms),
    )


def _root_mean_square(sides: Curve) -> float | None:
    """None if a side is not known, or there are none."""
    squares = 0.0
    for side in sides:
        if side is None:
            return None
        squares += side**2
    if not sides:
        return None
    return math.sqrt(squares / len(sides))
