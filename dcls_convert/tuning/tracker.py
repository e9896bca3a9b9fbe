"""Record how the elements of a model move during training, and read the records back.

Each record is one line of JSON. Lengths are in cells; positions count from the kernel centre.
"""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, check_argument
from ..geometry import position_limits
from ..input import read_bytes
from ..layers.double_precision import in_double
from ..layers.position_statistics import (
    bin_indices,
    border_share,
    mean_distance,
    overlap_share,
    rms_per_axis,
)
from ..networks.position_parameters import PositionParameter, position_parameters
from ..networks.wrappers import WRAPPER_NAMES, inside_wrappers
from ..records import Record, adapter
from ..text import one_line
from .sharded import full_tensor

TRACK_FORMAT = 1
# Number of elements per tensor whose individual positions are recorded; plots with more are
# unreadable.
FOLLOWED = 64
FOLLOWED_DIGITS = 2  # decimals of their positions, in cells
EXISTING_FILE = "use a new file for a new run, or call continue_from to resume"
Length = Annotated[float, Field(ge=-1e40, le=1e40)]  # cells; wider than the range of float32
Step = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedPositions:
    """One positions tensor at one step. A value that is not finite is recorded as None."""

    name: str  # name of the parameter, without prefixes of wrappers
    layers: tuple[str, ...]  # names of the layers that use it
    # Mean over all coordinates of |p_t - p_s| / (t - s), between the previous record, at step s,
    # and this one, at step t. None in the first record, and in the first after training was resumed
    # within an epoch.
    speed: Length | None
    border_share: Share  # share of elements at the border; if large, the window is too small
    overlap_share: Share  # share of elements closer than a cell to another of the same kernel
    spread: tuple[Length | None, ...]  # root mean square along each learnt axis
    mean_distance: Length | None  # mean distance from the kernel centre
    mean_sigma: Length | None  # also None if the interpolation has no sigma
    # For each learnt axis, the number of elements nearest to each cell of the window. Elements
    # outside the window count for the outermost cells. Positions that are not finite do not count.
    histograms: tuple[Annotated[tuple[int, ...], Field(min_length=1)], ...]
    # For each learnt axis, the coordinates of some elements; the same elements in every record.
    followed: tuple[tuple[Length | None, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackRecord(Record):
    """All positions tensors of a model at one step."""

    # Pydantic also applies this config to the nested records.
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    format: int = TRACK_FORMAT
    step: Step
    positions: tuple[TrackedPositions, ...]


class PositionTracker:
    """Records a model's positions during training, and how fast they move.

    Source: paper, appendix "Speed curves".

        tracker = tuning.PositionTracker(model, "positions.jsonl")
        for epoch in range(epochs):
            train(...)
            record = tracker.update(epoch)
            tuning.show_in_tensorboard(writer, record)  # optional

    Args:
        model: May be wrapped (DDP, FSDP2, `torch.compile`, EMA).
        path: File to which every update appends a line; `read_track` reads it. Steps must increase
            in the file, too: a new run needs a new file, and a resumed run calls `continue_from`.

    Between updates it keeps one copy of the positions. Under DDP and FSDP2 every rank must call
    `update` and gets the record, but only rank 0 writes to the file. FSDP1 is not supported, since
    it flattens parameters into shards.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        check_argument("model", model, nn.Module)
        self.model = model
        self.path = None if path is None else Path(path)
        self._last_step: int | None = None
        self._last_positions: dict[str, Tensor] = {}  # by parameter name

    @torch.no_grad()
    def update(self, step: int) -> TrackRecord:
        """Make a record of the present positions, and append it to the file.

        Args:
            step: Number of the step or epoch; it must increase. Speeds are per unit of `step`.

        Raises:
            DclsConvertError: `step` is not larger than the last step.
            CheckpointError: The file cannot be written, or has something else than records.
        """
        _check_integer(step)
        if self._last_step is None:
            self._last_step = self._cut_file(math.inf)
        if self._last_step is not None and step <= self._last_step:
            message = f"step {step} is not above the last step, {self._last_step}"
            if self.path is not None:
                message = f"{self.path}: {message}; {EXISTING_FILE}"
            raise DclsConvertError(message)
        parameters = position_parameters(inside_wrappers(self.model), "positions")
        rows = tuple(self._row(parameter, step) for parameter in parameters)
        record = TrackRecord(step=step, positions=rows)
        self._last_step = step
        if self.path is not None and is_first_rank():
            _append_line(self.path, adapter(TrackRecord).dump_json(record))
        return record

    @torch.no_grad()
    def continue_from(self, step: int) -> None:
        """Continue the record of an interrupted run, whose state the model has.

        The next speed is measured from the present positions. Records of later steps, which will
        come again, are removed from the file. Under DDP and FSDP2 every rank must call it.

        Args:
            step: The step of the model's state.

        Raises:
            DclsConvertError: `step` is not an integer.
            CheckpointError: The file cannot be written, or has something else than records.
        """
        _check_integer(step)
        self._cut_file(step)
        self._last_step = step
        for parameter in position_parameters(inside_wrappers(self.model), "positions"):
            name = WRAPPER_NAMES.sub("", parameter.name)
            self._last_positions[name] = full_tensor(parameter.tensor.detach()).clone()

    def _cut_file(self, last: float) -> int | None:
        """Remove records of later steps, and a line that a killed run left incomplete.

        Returns:
            The step of the last record in the file; None if there is none, or if this process does
            not write.
        """
        if self.path is None or not self.path.is_file() or not is_first_rank():
            return None
        steps = [record.step for record in read_track(self.path)]
        kept = list(itertools.takewhile(lambda step: step <= last, steps))
        try:
            lines = read_bytes(self.path).split(b"\n")[: len(kept)]
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {one_line(error)}") from error
        return max(kept, default=None)

    def _row(self, parameter: PositionParameter, step: int) -> TrackedPositions:
        positions = full_tensor(parameter.tensor.detach())  # (A, *C, E)
        name = WRAPPER_NAMES.sub("", parameter.name)
        speed = self._speed(name, positions, step)
        self._last_positions[name] = positions.clone()
        window = parameter.learnt_size
        histograms = []
        for coordinate, side in zip(positions, window, strict=True):
            histograms.append(_histogram(coordinate, side))
        first_layer = next(iter(parameter.layers.values()))
        mean_sigma = None
        if first_layer.sigma is not None:
            mean_sigma = _finite(float(in_double(full_tensor(first_layer.sigma)).mean()))
        return TrackedPositions(
            name=name,
            layers=tuple(WRAPPER_NAMES.sub("", layer) for layer in parameter.layers),
            speed=speed,
            border_share=border_share(positions, window),
            overlap_share=overlap_share(positions),
            spread=tuple(map(_finite, rms_per_axis(positions))),
            mean_distance=_finite(mean_distance(positions)),
            mean_sigma=mean_sigma,
            histograms=tuple(histograms),
            followed=_followed(positions),
        )

    def _speed(self, name: str, positions: Tensor, step: int) -> float | None:
        last_positions = self._last_positions.get(name)
        if self._last_step is None or last_positions is None:
            return None
        dtype = torch.promote_types(positions.dtype, torch.float32)
        moves = (positions.to(dtype) - last_positions.to(positions.device, dtype)).abs_()
        mean_move = float(in_double(moves).mean())
        return _finite(mean_move / (step - self._last_step))


def _check_integer(step: object) -> None:
    if not isinstance(step, int) or isinstance(step, bool):
        raise DclsConvertError(f"step={step!r} must be an integer")


def _append_line(path: Path, line: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(line + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {one_line(error)}") from error


def _histogram(coordinate: Tensor, side: int) -> tuple[int, ...]:
    """Return, for each cell of an axis, the number of finite coordinates nearest to it."""
    cells = bin_indices(coordinate[coordinate.isfinite()], side, 1)
    return tuple(torch.bincount(cells, minlength=side).tolist())


def _followed(positions: Tensor) -> tuple[tuple[float | None, ...], ...]:
    """Return the rounded coordinates, per axis, of at most FOLLOWED evenly chosen elements."""
    elements = positions.flatten(1)  # (A, all elements)
    count = min(FOLLOWED, elements.shape[1])
    chosen = torch.arange(count, device=positions.device) * elements.shape[1] // count
    followed = []
    for coordinates in in_double(elements[:, chosen]).tolist():
        followed.append(tuple(_finite(round(value, FOLLOWED_DIGITS)) for value in coordinates))
    return tuple(followed)


def read_track(path: str | os.PathLike[str]) -> tuple[TrackRecord, ...]:
    """Read the records that a `PositionTracker` wrote.

    An incomplete last line, which a killed run may have left, is ignored.

    Raises:
        CheckpointError: The file cannot be read, or a line is not a record; names the line.
    """
    try:
        lines = read_bytes(Path(path)).split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        records.append(TrackRecord.from_json(line, f"{path}: line {number}"))
    return tuple(records)


def show_in_tensorboard(writer: Any, record: TrackRecord) -> None:
    """Write a record to TensorBoard as scalars and histograms.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or an object with the same `add_scalar`
            and `add_histogram_raw` methods.
        record: A record from `PositionTracker.update` or `read_track`.
    """
    for row in record.positions:
        for name in ("speed", "border_share", "overlap_share", "mean_distance", "mean_sigma"):
            value = getattr(row, name)
            if value is not None:
                writer.add_scalar(f"{name}/{row.name}", value, record.step)
        for axis, counts in enumerate(row.histograms):
            _add_histogram(writer, f"positions/{row.name}/axis{axis}", counts, record.step)


def _add_histogram(writer: Any, tag: str, counts: Sequence[int], step: int) -> None:
    """Write the number of elements in each cell of an axis.

    TensorBoard also needs the sum and the sum of squares of all values; they are computed as if
    every element were at the centre of its cell.
    """
    first = position_limits(len(counts))[0]
    total = 0
    sum_of_squares = 0
    upper_bounds = []
    for cell, count in enumerate(counts, start=first):
        total += cell * count
        sum_of_squares += cell**2 * count
        upper_bounds.append(cell + 0.5)
    writer.add_histogram_raw(
        tag,
        min=first - 0.5,
        max=first + len(counts) - 0.5,
        num=sum(counts),
        sum=total,
        sum_squares=sum_of_squares,
        bucket_limits=upper_bounds,
        bucket_counts=list(counts),
        global_step=step,
    )


def is_first_rank() -> bool:
    """True in the process that writes files and log lines for all processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
