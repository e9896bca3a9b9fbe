"""Record how the elements of a model move while it is trained, and read the record back.

A record is one line of JSON; lengths are in cells, from the kernel centre.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, newer_format, one_line
from ..layers.interpolation import position_limits
from ..layers.position_statistics import border_share, mean_distance, overlap_share, spread
from ..layers.positions import SharedParameter, shared_parameters, unwrapped, whole

TRACK_FORMAT = 1
_STRICT = ConfigDict(strict=True, extra="forbid")
WRAPPERS_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of a part of a model


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """How many elements lie where along one axis. Bin i reaches from `low + i * width` to `low + (i + 1) * width`."""

    __pydantic_config__ = _STRICT

    low: float  # cells; half a cell below the first position that the window allows
    width: float  # cells
    counts: tuple[int, ...]  # elements beyond the window count in the outermost bins, those not finite nowhere


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedPositions:
    """One positions tensor at one step. A value that is not finite is None."""

    __pydantic_config__ = _STRICT

    name: str  # of the parameter, without what wrappers add to it
    layers: tuple[str, ...]  # that use it
    speed: float | None  # mean |P_t - P_s| / (t - s) of a coordinate since the last update; None in the first
    border_share: float  # of the elements; many mean that the window is too small
    overlap_share: float  # of the elements, nearer than a cell to another of their kernel
    spread: tuple[float | None, ...]  # standard deviation about the centre along each learnt axis
    mean_distance: float | None  # from the centre
    mean_sigma: float | None  # None also where the interpolation has no sigma
    histograms: tuple[Histogram, ...]  # one for each learnt axis


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackRecord:
    """All positions tensors of a model at one step."""

    __pydantic_config__ = _STRICT

    format: int = TRACK_FORMAT
    step: int
    positions: tuple[TrackedPositions, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class PositionTracker:
    """Follows a model's positions: where they are, and the speed at which they move (paper, appendix "Speed curves").

        with tuning.PositionTracker(model, "positions.jsonl") as tracker:
            for epoch in range(epochs):
                train(...)
                tracker.update(epoch)

    Args:
        model: May be wrapped (DDP, FSDP2, `torch.compile`, EMA).
        path: File to which every update appends a line, see `read_track`; goes on with a file that is there.
        tensorboard: A folder for TensorBoard's event files, or a `SummaryWriter` that is open already.
        bins_per_cell: Of the histograms.

    Between updates it holds one copy of the positions. Under DDP and FSDP2 every rank must call `update`, and gets the
    record; rank 0 alone writes. FSDP1 is not supported: its flat shards are no positions.

    Raises:
        CheckpointError: A path that cannot be written, or a file that is no such record.
        DclsConvertError: `bins_per_cell` below 1; TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str] | None = None,
        *,
        tensorboard: Any = None,
        bins_per_cell: int = 1,
    ) -> None:
        if not isinstance(bins_per_cell, int) or bins_per_cell < 1:
            raise DclsConvertError(f"bins_per_cell={bins_per_cell!r} must be an integer of at least 1")
        self.model, self.bins_per_cell = model, bins_per_cell
        self.path = None if path is None else Path(path)
        self._step: int | None = None
        self._before: dict[str, Tensor] = {}
        if self.path is not None and _writes():
            _prepare(self.path)
        self._owns_writer = isinstance(tensorboard, str | os.PathLike)
        self._writer = _open_writer(tensorboard) if self._owns_writer and _writes() else tensorboard

    @torch.no_grad()
    def update(self, step: int) -> TrackRecord:
        """Take a record, and write it wherever it was asked for.

        Args:
            step: Number of the step or epoch, larger than the last; speeds are per step, or per epoch.

        Raises:
            DclsConvertError: A step that is not after the last one.
            CheckpointError: The file cannot be written.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise DclsConvertError(f"step={step!r} must be an integer")
        if self._step is not None and step <= self._step:
            raise DclsConvertError(f"step {step} must come after step {self._step}, the last that was recorded")
        rows = []
        for positions, sigma in _by_layer(unwrapped(self.model)):
            now = whole(positions.tensor.detach())
            width = None if sigma is None else whole(sigma.detach())
            rows.append(self._row(positions, now, width, step))
            self._before[rows[-1].name] = now.clone()
        self._step = step
        record = TrackRecord(step=step, positions=tuple(rows))
        if _writes():
            self._write(record)
        return record

    def _row(self, shared: SharedParameter, now: Tensor, sigma: Tensor | None, step: int) -> TrackedPositions:
        name = _plain(shared.name)
        return TrackedPositions(
            name=name,
            layers=tuple(map(_plain, shared.layer_names)),
            speed=self._speed(name, now, step),
            border_share=border_share(now, shared.learnt_size),
            overlap_share=overlap_share(now),
            spread=tuple(map(_finite, spread(now))),
            mean_distance=_finite(mean_distance(now)),
            mean_sigma=None if sigma is None else _finite(float(sigma.mean(dtype=torch.float64))),
            histograms=tuple(
                _histogram(axis, size, self.bins_per_cell) for axis, size in zip(now, shared.learnt_size, strict=True)
            ),
        )

    def _speed(self, name: str, now: Tensor, step: int) -> float | None:
        before = self._before.get(name)
        if before is None or self._step is None or before.shape != now.shape:
            return None
        exact = torch.promote_types(now.dtype, torch.float32)
        moved = (now.to(exact) - before.to(now.device, exact)).abs_()
        return _finite(float(moved.mean(dtype=torch.float64)) / (step - self._step))

    def _write(self, record: TrackRecord) -> None:
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be written: {one_line(error)}") from error
        if self._writer is not None:
            _show(self._writer, record)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on, for the checkpoint of the training loop; tensors and plain values."""
        return {"step": self._step, "positions": {name: tensor.clone() for name, tensor in self._before.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next speed is since then.

        Lines that the file has of later steps stay in it; `read_track` knows that they were done again.
        """
        self._step = state["step"]
        self._before = {name: tensor.clone() for name, tensor in state["positions"].items()}

    def close(self) -> None:
        """Close TensorBoard's file, where the tracker opened it."""
        if self._owns_writer and self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_track(path: str | os.PathLike[str]) -> tuple[TrackRecord, ...]:
    """The records that a `PositionTracker` wrote, in the order of their steps.

    Where a run was resumed from an earlier step, what it did again replaces what it had done before. A last line that
    was not finished is left out.

    Raises:
        CheckpointError: No such file, or not such lines; names the line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    records: list[TrackRecord] = []
    for number, line in enumerate(lines[:-1], start=1):  # the last has no end: empty, or unfinished
        record = _parse(line, f"{path}: line {number}")
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return tuple(records)


_ADAPTER: TypeAdapter[TrackRecord] = TypeAdapter(TrackRecord)


def _parse(line: bytes, where: str) -> TrackRecord:
    try:
        record = _ADAPTER.validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            f"{where}: {place + ': ' if place else ''}{problem['msg']}; a line of a PositionTracker is expected"
        ) from error
    if record.format > TRACK_FORMAT:
        raise CheckpointError(newer_format(where, record.format, TRACK_FORMAT))
    return record


def _prepare(path: Path) -> None:
    """See that the file can be appended to, and that it holds such records; cut an unfinished line off its end."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: there is no folder {path.parent}")
    try:
        with path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            end = content.rfind(b"\n") + 1
            if content:
                # An unfinished line by itself could be anything.
                _parse(content[: content.find(b"\n")] if end else content, f"{path}: line 1")
                file.truncate(end)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {one_line(error)}") from error


def _writes() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0)


def _by_layer(model: nn.Module) -> list[tuple[SharedParameter, Tensor | None]]:
    """Each positions tensor, and the sigma of its first layer."""
    return [(one, one.layers[0].sigma) for one in shared_parameters(model) if one.kind == "positions"]


def _plain(name: str) -> str:
    for wrapper in WRAPPERS_INSIDE:
        name = name.replace(wrapper, "")
    return name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _histogram(coordinate: Tensor, size: int, bins_per_cell: int) -> Histogram:
    low = position_limits(size)[0] - 0.5
    bins = size * bins_per_cell
    exact = coordinate.flatten().to(torch.promote_types(coordinate.dtype, torch.float32))
    exact = exact[exact.isfinite()]
    index = ((exact - low) * bins_per_cell).floor().clamp(0, bins - 1).long()
    counts = torch.bincount(index, minlength=bins)
    return Histogram(low=low, width=1 / bins_per_cell, counts=tuple(counts.tolist()))


def _open_writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DclsConvertError(f"TensorBoard is not installed ({one_line(error)}): pip install tensorboard") from error
    return SummaryWriter(os.fspath(folder))


def _show(writer: Any, record: TrackRecord) -> None:
    for row in record.positions:
        scalars = {name: getattr(row, name) for name in ("speed", "border_share", "overlap_share", "mean_distance")}
        scalars |= {"mean_sigma": row.mean_sigma}
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(f"{name}/{row.name}", value, record.step)
        for axis, histogram in enumerate(row.histograms):
            writer.add_histogram_raw(f"positions/{row.name}/axis{axis}", **_raw(histogram), global_step=record.step)


def _raw(histogram: Histogram) -> dict[str, Any]:
    """As TensorBoard takes a histogram that is counted already; every element in the middle of its bin."""
    middles = [histogram.low + (index + 0.5) * histogram.width for index in range(len(histogram.counts))]
    filled = list(zip(middles, histogram.counts, strict=True))
    half = histogram.width / 2
    return {
        "min": histogram.low,
        "max": middles[-1] + half,
        "num": sum(histogram.counts),
        "sum": sum(middle * count for middle, count in filled),
        "sum_squares": sum(middle**2 * count for middle, count in filled),
        "bucket_limits": [middle + half for middle in middles],
        "bucket_counts": list(histogram.counts),
    }
