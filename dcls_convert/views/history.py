"""How positions moved in training, from what a `PositionTracker` wrote."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoints.inspection import PositionSet, position_sets
from ..errors import CheckpointError
from ..geometry import size_text
from ..planning.plan import ConversionPlan
from ..tables import Column, Table, indented
from ..text import counted, shown
from ..tuning.tracker import TrackedPositions, TrackRecord, read_track

Curve = tuple[float | None, ...]  # a value for each step; None where it is not known
Coordinates = tuple[float | None, ...]  # of the followed elements along one axis
MAX_FRAME_NUMBERS = 120_000  # coordinates and counts of all moving pictures together
MAX_STEPS = 10  # of the table; a record of a long training has hundreds


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackPicture:
    """One positions tensor through a training."""

    name: str
    size: tuple[int, ...]  # cells of the window along the learnt axes
    speed: Curve  # cells for a step
    spread: Curve  # cells; root mean square over the axes
    border: tuple[float, ...]  # share of the elements at the window's border, at each step
    # At each of `moving_steps`, coordinates of the followed elements along each learnt axis.
    frames: tuple[tuple[Coordinates, ...], ...]
    # Along each axis, at each of `moving_steps`, the number of elements in each bin.
    histograms: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPicture:
    """A whole record of a training: every positions tensor, at every recorded step."""

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


def read_history_of(path: str | os.PathLike[str], plan: ConversionPlan) -> HistoryPicture:
    """As `read_history`, with the names that an inspection of the plan's checkpoint shows.

    Raises:
        CheckpointError: As for `read_history`, or the record is of another model.
    """
    history = read_history(path)
    if not history.tracks:
        raise CheckpointError(f"{path}: is a record of a model without positions")
    sets = position_sets(plan)
    # Both are in the order of the layers.
    is_of_this_model = len(history.tracks) == len(sets) and all(
        map(_is_record_of, history.tracks, sets)
    )
    if not is_of_this_model:
        track = history.tracks[0]
        recorded = _tensors_text(len(history.tracks), track.name, track.size)
        stored = _tensors_text(len(sets), sets[0].parameters["positions"], sets[0].learnt_size)
        raise CheckpointError(
            f"{path}: is a record of another model; it follows {recorded}, the checkpoint has "
            f"{stored}"
        )
    tracks = []
    for track, positions in zip(history.tracks, sets, strict=True):
        tracks.append(replace(track, name=positions.name))
    return replace(history, tracks=tuple(tracks))


def _is_record_of(track: TrackPicture, positions: PositionSet) -> bool:
    """Whether the names and the sizes agree."""
    parameter = positions.parameters["positions"]
    # The tracker may have followed a module that holds the network under a name.
    same_name = track.name == parameter or track.name.endswith(f".{parameter}")
    return same_name and track.size == positions.learnt_size


def _tensors_text(count: int, first: str, size: tuple[int, ...]) -> str:
    """ "4 positions tensors, the first stages.0.dcls_positions in 17x17"."""
    return f"{counted(count, 'positions tensor')}, the first {shown(first)} in {size_text(size)}"


def isolated_points(curve: Curve) -> list[int]:
    """Indices of known values whose neighbours are not known."""
    isolated = []
    padded = (None, *curve, None)
    for index, value in enumerate(curve):
        before = padded[index]
        after = padded[index + 2]
        if value is not None and before is None and after is None:
            isolated.append(index)
    return isolated


def _form(record: TrackRecord) -> list[tuple[str, list[int]]]:
    """The name of each positions tensor, and its number of bins along each axis."""
    return [(row.name, list(map(len, row.histograms))) for row in record.positions]


def _followed_counts(row: TrackedPositions) -> tuple[int, ...]:
    """How many elements are followed along each axis."""
    return tuple(map(len, row.followed))


def _moving_records(records: Sequence[TrackRecord]) -> list[TrackRecord]:
    """Evenly spaced records, first and last included, of MAX_FRAME_NUMBERS numbers at most.

    There are two at least, however many numbers they have.
    """
    numbers = 0  # in one record
    for row in records[0].positions:
        numbers += sum(_followed_counts(row)) + sum(map(len, row.histograms))
    max_records = max(2, MAX_FRAME_NUMBERS // max(numbers, 1))
    return [records[index] for index in _evenly_spaced(len(records), max_records)]


def _evenly_spaced(count: int, max_records: int) -> list[int]:
    """At most so many of `count` indices, the first and the last included."""
    if count <= max_records:
        return list(range(count))
    return [round(index * (count - 1) / (max_records - 1)) for index in range(max_records)]


def _track_picture(
    rows: Sequence[TrackedPositions], moving_rows: Sequence[TrackedPositions]
) -> TrackPicture:
    """The picture of one positions tensor, whose rows are those of all records."""
    speed = []
    spread = []
    border = []
    for row in rows:
        speed.append(row.speed)
        spread.append(_root_mean_square(row.spread))
        border.append(row.border_share)
    histograms = zip(*(row.histograms for row in moving_rows), strict=True)
    return TrackPicture(
        name=rows[0].name,
        size=tuple(map(len, rows[0].histograms)),  # a tracker counts a bin for each cell
        speed=tuple(speed),
        spread=tuple(spread),
        border=tuple(border),
        frames=tuple(row.followed for row in moving_rows),
        histograms=tuple(histograms),
    )


def _root_mean_square(sides: Sequence[float | None]) -> float | None:
    """None if a side is not known, or there are none."""
    squares = 0.0
    for side in sides:
        if side is None:
            return None
        squares += side**2
    if not sides:
        return None
    return math.sqrt(squares / len(sides))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One positions tensor at one step."""

    name: str
    step: int
    speed: float | None
    spread: float | None
    border: float


HISTORY_COLUMNS: list[Column[_Row]] = [
    Column("Positions", lambda row: row.name),
    Column("Step", lambda row: row.step, "{:,}".format),
    Column("Speed", lambda row: row.speed, "{:.2g}".format),
    Column("Spread", lambda row: row.spread, "{:.2f}".format),
    Column("Border", lambda row: 100 * row.border, "{:.1f} %".format),
]


def history_view(history: HistoryPicture) -> RenderableType:
    """For a terminal: each positions tensor at some steps, the first and the last among them."""
    shown_steps = _evenly_spaced(len(history.steps), MAX_STEPS)
    rows = []
    for track in history.tracks:
        for index in shown_steps:
            rows.append(
                _Row(
                    name=track.name,
                    step=history.steps[index],
                    speed=track.speed[index],
                    spread=track.spread[index],
                    border=track.border[index],
                )
            )
    lines = [
        "Speed: mean distance that a coordinate moves per step, in cells.",
        "Spread: root mean square of the coordinates from the centre, over all axes, in cells.",
    ]
    if len(shown_steps) < len(history.steps):
        lines.insert(0, f"{len(shown_steps)} of {len(history.steps):,} recorded steps.")
    return Group(Table(HISTORY_COLUMNS, rows), Text(), *map(indented, lines))
