"""How positions moved in training, from what a `PositionTracker` wrote."""

import math
import os
from dataclasses import dataclass

from ..errors import CheckpointError, shown
from ..tuning.tracker import read_track

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
    frames: tuple[
        tuple[Curve, ...], ...
    ]  # at each of `moving_steps`, the followed elements along each learnt axis
    histograms: tuple[
        tuple[tuple[int, ...], ...], ...
    ]  # along each axis, at each of `moving_steps`, elements in bins


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPicture:
    """All of a record."""

    steps: tuple[int, ...]
    moving_steps: tuple[int, ...]  # a part of them where they are many
    tracks: tuple[TrackPicture, ...]


def read_history(path: str | os.PathLike[str]) -> HistoryPicture:
    """The curves and moving positions of a `positions.jsonl`; CheckpointError where it is none or of several models."""
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    # Of each record and tensor: the name, and how many bins there are along each axis.
    forms = [[(row.name, [*map(len, row.histograms)]) for row in one.positions] for one in records]
    for record, form in zip(records, forms, strict=True):
        if form != forms[0]:
            first = records[0].step
            raise CheckpointError(
                f"{path}: the records of steps {first} and {record.step} differ in tensors"
            )
    # Evenly spaced records, with the first and the last, whose coordinates are not too many.
    numbers = sum(sum(map(len, row.followed)) for row in records[0].positions)
    numbers += sum(sum(bins) for _, bins in forms[0])
    most = min(max(2, MOST_NUMBERS // max(numbers, 1)), len(records))
    moving = [
        records[round(index * (len(records) - 1) / max(most - 1, 1))] for index in range(most)
    ]
    tracks = []
    for place, first_row in enumerate(records[0].positions):
        rows, moving_rows = (
            [record.positions[place] for record in some] for some in (records, moving)
        )
        if len({tuple(map(len, row.followed)) for row in rows}) > 1:
            raise CheckpointError(
                f"{path}: the records follow several numbers of elements of {shown(first_row.name)}"
            )
        track = TrackPicture(
            name=first_row.name,
            size=tuple(map(len, first_row.histograms)),
            speed=tuple(row.speed for row in rows),
            spread=tuple(_root_mean_square(row.spread) for row in rows),
            border=tuple(row.border_share for row in rows),
            frames=tuple(row.followed for row in moving_rows),
            histograms=tuple(zip(*(row.histograms for row in moving_rows), strict=True)),
        )
        tracks.append(track)
    return HistoryPicture(
        steps=tuple(record.step for record in records),
        moving_steps=tuple(record.step for record in moving),
        tracks=tuple(tracks),
    )


def _root_mean_square(sides: Curve) -> float | None:
    known = [side for side in sides if side is not None]
    return (
        math.sqrt(sum(side**2 for side in known) / len(known))
        if known and len(known) == len(sides)
        else None
    )
