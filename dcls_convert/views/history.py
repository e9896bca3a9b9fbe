"""How positions moved during training, read from the file of a `PositionTracker`."""

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
from ..text import count_text, shortened
from ..tuning.tracker import TrackedPositions, TrackRecord, read_track

Curve = tuple[float | None, ...]  # a value for each step; None if it is unknown
Coordinates = tuple[float | None, ...]  # coordinates of the followed elements along one axis
MAX_FRAME_NUMBERS = 120_000  # bound on the coordinates in all frames together
MAX_TABLE_STEPS = 10  # a long training run records hundreds
# Curves of a `TrackPicture`, and their labels in pictures.
CURVE_LABELS = {
    "speed": "speed (cells per step)",
    "spread": "spread (cells)",
    "border": "share at the border",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackPicture:
    """How one positions tensor moved during training."""

    name: str
    size: tuple[int, ...]  # cells of the window along the learnt axes
    speed: Curve  # cells per step
    spread: Curve  # cells; root mean square over the axes
    border: tuple[float, ...]  # at each step, the share of elements at the window's border
    # At each of `moving_steps`, the coordinates of the followed elements along each learnt axis.
    frames: tuple[tuple[Coordinates, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPicture:
    """The whole record of a training run: all positions tensors at all recorded steps."""

    steps: tuple[int, ...]
    moving_steps: tuple[int, ...]  # the steps that the moving pictures show
    tracks: tuple[TrackPicture, ...]


def read_history(path: str | os.PathLike[str]) -> HistoryPicture:
    """Return the curves and moving positions of a `positions.jsonl`.

    Raises:
        CheckpointError: The file is not such a record, or its records are of different models.
    """
    records = read_track(path)
    if not records:
        raise CheckpointError(f"{path}: has no records")
    first = records[0]
    for record in records:
        if _names_and_bins(record) != _names_and_bins(first):
            steps = f"{first.step} and {record.step}"
            raise CheckpointError(f"{path}: the records of steps {steps} differ in tensors")
    moving = _moving_records(records)
    tracks = []
    for index, row in enumerate(first.positions):
        rows = [record.positions[index] for record in records]
        moving_rows = [record.positions[index] for record in moving]
        if len(set(map(_followed_counts, rows))) > 1:
            raise CheckpointError(
                f"{path}: the records follow different numbers of elements of {shortened(row.name)}"
            )
        tracks.append(_track_picture(rows, moving_rows))
    return HistoryPicture(
        steps=tuple(record.step for record in records),
        moving_steps=tuple(record.step for record in moving),
        tracks=tuple(tracks),
    )


def read_checkpoint_history(path: str | os.PathLike[str], plan: ConversionPlan) -> HistoryPicture:
    """Return `read_history` of a file, with the names in an inspection of the plan's checkpoint.

    Raises:
        CheckpointError: `read_history` refuses the file, or the record is of another model.
    """
    history = read_history(path)
    if not history.tracks:
        raise CheckpointError(f"{path}: is a record of a model without positions")
    sets = position_sets(plan)
    # The tracks and the sets are both in the order of the layers.
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
    """True if the name and the window size of a track agree with the plan's."""
    parameter = positions.parameters["positions"]
    # The tracked module may contain the network, which adds a prefix to the names.
    same_name = track.name == parameter or track.name.endswith(f".{parameter}")
    return same_name and track.size == positions.learnt_size


def _tensors_text(count: int, first: str, size: tuple[int, ...]) -> str:
    """Return "4 positions tensors, the first stages.0.dcls_positions in 17x17"."""
    tensors = count_text(count, "positions tensor")
    return f"{tensors}, the first {shortened(first)} in {size_text(size)}"


def _names_and_bins(record: TrackRecord) -> list[tuple[str, list[int]]]:
    """Return the name of each positions tensor, and its number of bins along each axis."""
    return [(row.name, list(map(len, row.histograms))) for row in record.positions]


def _followed_counts(row: TrackedPositions) -> tuple[int, ...]:
    """Return the number of elements that are followed along each axis."""
    return tuple(map(len, row.followed))


def _moving_records(records: Sequence[TrackRecord]) -> list[TrackRecord]:
    """Choose evenly spaced records, the first and the last included.

    Together they have at most MAX_FRAME_NUMBERS numbers; but at least two records are chosen.
    """
    numbers_per_record = 0
    for row in records[0].positions:
        numbers_per_record += sum(_followed_counts(row))
    max_records = max(2, MAX_FRAME_NUMBERS // max(numbers_per_record, 1))
    return [records[index] for index in _evenly_spaced(len(records), max_records)]


def _evenly_spaced(count: int, max_indices: int) -> list[int]:
    """Choose at most `max_indices` of the indices below `count`, with the first and the last."""
    if count <= max_indices:
        return list(range(count))
    return [round(number * (count - 1) / (max_indices - 1)) for number in range(max_indices)]


def _track_picture(
    rows: Sequence[TrackedPositions], moving_rows: Sequence[TrackedPositions]
) -> TrackPicture:
    """Return the picture of one positions tensor from its rows in the records."""
    speed = []
    spread = []
    border = []
    for row in rows:
        speed.append(row.speed)
        spread.append(_root_mean_square(row.spread))
        border.append(row.border_share)
    return TrackPicture(
        name=rows[0].name,
        size=tuple(map(len, rows[0].histograms)),  # a tracker's bins are the cells
        speed=tuple(speed),
        spread=tuple(spread),
        border=tuple(border),
        frames=tuple(row.followed for row in moving_rows),
    )


def _root_mean_square(sides: Sequence[float | None]) -> float | None:
    """Return the root mean square, or None if a side is unknown or there are no sides."""
    squares = 0.0
    for side in sides:
        if side is None:
            return None
        squares += side**2
    if not sides:
        return None
    return math.sqrt(squares / len(sides))


@dataclass(frozen=True, kw_only=True, slots=True)
class _HistoryRow:
    """One positions tensor at one step."""

    name: str
    step: int
    speed: float | None
    spread: float | None
    border: float


HISTORY_COLUMNS: list[Column[_HistoryRow]] = [
    Column("Positions", lambda row: row.name),
    Column("Step", lambda row: row.step, "{:,}".format),
    Column("Speed", lambda row: row.speed, "{:.5f}".format),
    Column("Spread", lambda row: row.spread, "{:.2f}".format),
    Column("Border", lambda row: 100 * row.border, "{:.1f} %".format),
]


def history_view(history: HistoryPicture) -> RenderableType:
    """Return a table of each positions tensor at some steps, the first and the last included."""
    shown_indices = _evenly_spaced(len(history.steps), MAX_TABLE_STEPS)
    rows = []
    for track in history.tracks:
        for index in shown_indices:
            rows.append(
                _HistoryRow(
                    name=track.name,
                    step=history.steps[index],
                    speed=track.speed[index],
                    spread=track.spread[index],
                    border=track.border[index],
                )
            )
    lines = [
        "Speed: mean distance that a coordinate moves while Step grows by 1, in cells.",
        "Spread: root mean square of the coordinates from the centre, over all axes, in cells.",
    ]
    if len(shown_indices) < len(history.steps):
        lines.insert(0, f"{len(shown_indices)} of {len(history.steps):,} recorded steps.")
    return Group(Table(HISTORY_COLUMNS, rows), Text(), *map(indented, lines))
