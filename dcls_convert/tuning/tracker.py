"""Record how the elements of a model move while it is trained, and read the record back.

A record is one line of JSON; lengths are in cells, from the kernel centre.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, one_line
from ..files import read_bytes
from ..layers.interpolation import position_limits
from ..layers.position_statistics import bins, border_share, mean_distance, overlap_share, spread
from ..networks.positions import PositionParameter, position_parameters, unwrapped, whole
from ..records import Record, adapter

TRACK = "positions.jsonl"  # its usual name
TRACK_FORMAT = 1
FOLLOWED = (
    64  # elements of each tensor whose own positions are recorded; a picture of more is a blot
)
FOLLOWED_DIGITS = 2  # after the point; cells
Length = Annotated[float, Field(ge=-1e40, le=1e40)]  # cells; float32 has no larger ones
Step = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
INSIDE_WRAPPERS = re.compile(
    r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)  # of a model's parts


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedPositions:
    """One positions tensor at one step. A value that is not finite is None."""

    name: str  # of the parameter, without what wrappers add to it
    layers: tuple[str, ...]  # that use it
    speed: (
        Length | None
    )  # mean |P_t - P_s| / (t - s) of a coordinate since the last update; None in the first
    border_share: Share  # of the elements; many mean that the window is too small
    overlap_share: Share  # of the elements, nearer than a cell to another of their kernel
    spread: tuple[Length | None, ...]  # standard deviation about the centre along each learnt axis
    mean_distance: Length | None  # from the centre
    mean_sigma: Length | None  # None also where the interpolation has no sigma
    # For each learnt axis, the elements nearest to each cell of the window. Those beyond it count
    # in the outermost cells, those that are not finite nowhere.
    histograms: tuple[Annotated[tuple[int, ...], Field(min_length=1)], ...]
    followed: tuple[
        tuple[Length | None, ...], ...
    ]  # coordinates of the same few elements, for each learnt axis


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackRecord(Record):
    """All positions tensors of a model at one step."""

    __pydantic_config__ = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )  # of the records inside too

    format: int = TRACK_FORMAT
    step: Step
    positions: tuple[TrackedPositions, ...]


class PositionTracker:
    """Follows a model's positions: where they are, and the speed at which they move (paper,
    appendix "Speed curves").

        tracker = tuning.PositionTracker(model, "positions.jsonl")
        for epoch in range(epochs):
            train(...)
            record = tracker.update(epoch)
            tuning.show_in_tensorboard(writer, record)  # if you like

    Args:
        model: May be wrapped (DDP, FSDP2, `torch.compile`, EMA).
        path: File to which every update appends a line; `read_track` reads it.

    Between updates it holds one copy of the positions. Under DDP and FSDP2 every rank must call
    `update`, and gets the record; rank 0 alone writes. FSDP1 is not supported: its flat shards are
    no positions.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike[str] | None = None) -> None:
        self.model = model
        self.path = None if path is None else Path(path)
        self._step: int | None = None
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> TrackRecord:
        """Take a record, and append it to the file.

        Args:
            step: Number of the step or epoch, larger than the last; its unit is that of the speeds.

        Raises:
            DclsConvertError: A step that is not after the last one.
            CheckpointError: The file cannot be written.
        """
        if (
            not isinstance(step, int)
            or isinstance(step, bool)
            or (self._step is not None and step <= self._step)
        ):
            raise DclsConvertError(
                f"step={step!r} must be an integer above the last step, {self._step}"
            )
        parameters = position_parameters(unwrapped(self.model), "positions")
        record = TrackRecord(
            step=step, positions=tuple(self._row(parameter, step) for parameter in parameters)
        )
        self._step = step
        if self.path is not None and is_first_rank():
            try:
                with self.path.open("ab") as file:
                    file.write(adapter(TrackRecord).dump_json(record) + b"\n")
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be written: {one_line(error)}"
                ) from error
        return record

    def _row(self, parameter: PositionParameter, step: int) -> TrackedPositions:
        now, sigma = whole(parameter.tensor.detach()), next(iter(parameter.layers.values())).sigma
        name, size = INSIDE_WRAPPERS.sub("", parameter.name), parameter.learnt_size
        speed, before = None, self._before.get(name)
        self._before[name] = now.clone()
        if self._step is not None and before is not None:
            exact = torch.promote_types(now.dtype, torch.float32)
            moved = (now.to(exact) - before.to(now.device, exact)).abs_()
            speed = _finite(float(moved.mean(dtype=torch.float64)) / (step - self._step))
        flat = now.flatten(1)
        count = min(FOLLOWED, flat.shape[1])
        followed = (
            flat[:, torch.arange(count, device=now.device) * flat.shape[1] // count]
            .double()
            .tolist()
        )
        return TrackedPositions(
            name=name,
            layers=tuple(INSIDE_WRAPPERS.sub("", layer) for layer in parameter.layers),
            speed=speed,
            border_share=border_share(now, size),
            overlap_share=overlap_share(now),
            spread=tuple(map(_finite, spread(now))),
            mean_distance=_finite(mean_distance(now)),
            mean_sigma=None
            if sigma is None
            else _finite(float(whole(sigma).mean(dtype=torch.float64))),
            histograms=tuple(_histogram(*pair) for pair in zip(now, size, strict=True)),
            followed=tuple(
                tuple(_finite(round(value, FOLLOWED_DIGITS)) for value in axis) for axis in followed
            ),
        )


def _histogram(coordinate: Tensor, side: int) -> tuple[int, ...]:
    return tuple(
        torch.bincount(bins(coordinate[coordinate.isfinite()], side, 1), minlength=side).tolist()
    )


def read_track(path: str | os.PathLike[str]) -> tuple[TrackRecord, ...]:
    """The records that a `PositionTracker` wrote. A last line without an end, of a killed run, is
    left out.

    Raises:
        CheckpointError: No such file, or a line that is no record; names the line.
    """
    try:
        lines = read_bytes(Path(path)).split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    return tuple(
        TrackRecord.from_json(line, f"{path}: line {at}")
        for at, line in enumerate(lines[:-1], start=1)
    )


def show_in_tensorboard(writer: Any, record: TrackRecord) -> None:
    """Write a record as scalars and histograms.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or an object with its `add_scalar` and
            `add_histogram_raw`.
        record: From `PositionTracker.update` or `read_track`.
    """
    for row in record.positions:
        for name in ("speed", "border_share", "overlap_share", "mean_distance", "mean_sigma"):
            if (value := getattr(row, name)) is not None:
                writer.add_scalar(f"{name}/{row.name}", value, record.step)
        for axis, counts in enumerate(row.histograms):
            first = position_limits(len(counts))[0]
            filled = list(
                enumerate(counts, start=first)
            )  # sums place each element in its cell's middle
            writer.add_histogram_raw(
                f"positions/{row.name}/axis{axis}",
                min=first - 0.5,
                max=first + len(counts) - 0.5,
                num=sum(counts),
                sum=sum(cell * count for cell, count in filled),
                sum_squares=sum(cell**2 * count for cell, count in filled),
                bucket_limits=[cell + 0.5 for cell, _ in filled],
                bucket_counts=list(counts),
                global_step=record.step,
            )


def is_first_rank() -> bool:
    """Whether this process is the one that writes files and lines for all."""
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
