"""Record how the elements of a model move during training, and read the records back."""

import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from ..depthwise.devices import in_double
from ..errors import CheckpointError, DclsConvertError, check_argument
from ..file_checks import read_bytes
from ..geometry import plain_numbers
from ..layers.position_parameters import (
    PositionParameter,
    describe_imprecise,
    position_parameters,
)
from ..layers.position_statistics import border_share, from_old_centre
from ..layers.ties import is_sharded
from ..networks.wrappers import WRAPPER_NAMES, inside_wrappers
from ..records import STRICT, Record, adapter
from ..text import one_line

Unit = Literal["step", "epoch"]  # what the numbers of records count
Cells = Annotated[float, Field(ge=0, le=1e40)]  # the limit is beyond the range of float32
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0)]
Step = Annotated[int, Field(ge=-(2**63), lt=2**63)]
RATIO_TOLERANCE = 0.01  # relative; a smaller fall of the ratio is rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedPositions:
    """One positions tensor at one step or epoch. A value that is not finite is recorded as None."""

    # Mean distance that a coordinate moved since the tracker's last record, in cells per step or
    # epoch. None in the first record of a tracker.
    speed: Cells | None
    border_share: Share  # share of elements at the border; if large, the window is too small
    # Root mean square of the coordinates from the kernel's centre, in cells; where a window grows
    # to one side, from the old kernel's centre.
    spread: Cells | None
    # Learning rate of the positions, relative to the rate of their first layer's weight. None if
    # the tracker has no optimizer, if the optimizer lacks one of the two parameters, or if the
    # weight's rate is 0.
    lr_ratio: Ratio | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackRecord(Record):
    """All positions tensors of a model at one step or epoch; in a file, one line of JSON."""

    __pydantic_config__ = STRICT

    step: Step  # number of the step or epoch
    unit: Unit = "step"  # old records do not state it
    positions: dict[str, TrackedPositions]  # by parameter name, without prefixes of wrappers


class PositionTracker:
    """Records where a model's elements are during training, and how fast they move.

        tracker = tuning.PositionTracker(
            model, "positions.jsonl", unit="epoch", optimizer=optimizer
        )
        tracker.update(0)  # before the training
        for epoch in range(1, epochs + 1):
            train(...)
            tracker.update(epoch)

    `dcls-convert inspect FOLDER --history positions.jsonl --picture FILE` draws the file.

    Args:
        model: May be wrapped (DDP, FSDP2, `torch.compile`, EMA).
        path: File to which every update appends a line; `read_track` reads it.
        unit: What the `step` of `update` counts: "step" or "epoch". Records state the unit, and
            figures name their axes by it.
        optimizer: If given, records have the learning rate of positions relative to the rate of
            weights. A warning is raised if the optimizer treats positions like weights, or when the
            relative rate falls, as under a scheduler that sets one rate for all groups.

    Between updates, the tracker keeps one copy of the positions. Under DDP and FSDP2, every rank
    must call `update` and gets the record, but only rank 0 writes to the file. Under FSDP1, give
    the network itself, not the wrapper, and update inside `FSDP.summon_full_params(wrapper)`.

    Raises:
        CheckpointError: The file cannot be written.
        DclsConvertError: `unit` is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str] | None = None,
        *,
        unit: Unit = "step",
        optimizer: Optimizer | None = None,
    ) -> None:
        check_argument("model", model, nn.Module)
        if unit not in get_args(Unit):
            raise DclsConvertError(f"unit={unit!r} must be 'step' or 'epoch'")
        if optimizer is not None:
            check_argument("optimizer", optimizer, Optimizer)
        self.model = model
        self.path = None if path is None else Path(path)
        self.unit = unit
        self.optimizer = optimizer
        self._highest_ratio = 0.0  # highest so far of each record's lowest `lr_ratio`
        self._has_warned = False
        self._last_step: int | None = None
        self._last_positions: dict[str, Tensor] = {}  # from the old kernels' centres, by name
        # Fail now if the file cannot be written, or counts another unit, not after an epoch.
        self._append(b"")
        if self.path is not None and is_first_rank():
            _drop_incomplete_line(self.path)
            records = read_track(self.path)
            if records:
                _check_unit(self.path, len(records) + 1, unit, records[0])

    @torch.no_grad()
    def update(self, step: int) -> TrackRecord:
        """Make a record of the present positions, and append it to the file.

        Args:
            step: Number of the step or epoch; it must increase.

        Raises:
            DclsConvertError: `step` is not an integer above the last step.
            CheckpointError: The file cannot be written.
        """
        step = plain_numbers(step)
        last = self._last_step
        if not isinstance(step, int) or (last is not None and step <= last):
            raise DclsConvertError(f"step={step!r} must be an integer above the last step, {last}")
        rate_of: dict[int, float] = {}  # id of a parameter -> its learning rate
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                rate_of |= {id(tensor): float(group["lr"]) for tensor in group["params"]}
        rows = {}
        parameters = position_parameters(inside_wrappers(self.model), "positions")
        if last is None and is_first_rank():
            for problem in (describe_imprecise(parameters), self._describe_groups(parameters)):
                if problem is not None:
                    warnings.warn(problem, stacklevel=3)  # caller of `update`; `no_grad` is between
        for parameter in parameters:
            name = WRAPPER_NAMES.sub("", parameter.name)
            positions: Any = parameter.tensor.detach()  # (A, *C, E)
            if is_sharded(positions):
                positions = positions.full_tensor()
            from_centre = from_old_centre(positions, parameter.old_centre)
            rows[name] = TrackedPositions(
                speed=self._speed(name, from_centre, step),
                border_share=border_share(positions, parameter.learnt_size, parameter.learnt_grow),
                spread=_finite(in_double(from_centre).square().mean().sqrt()),
                lr_ratio=_lr_ratio(parameter, rate_of),
            )
            self._last_positions[name] = from_centre
        self._last_step = step
        record = TrackRecord(step=step, unit=self.unit, positions=rows)
        self._append(adapter(TrackRecord).dump_json(record) + b"\n")
        ratios = [row.lr_ratio for row in rows.values() if row.lr_ratio is not None]
        if ratios and is_first_rank():
            self._warn_if_ratio_fell(min(ratios))
        return record

    def _describe_groups(self, parameters: Iterable[PositionParameter]) -> str | None:
        """Say whether the optimizer treats positions like weights, and how to correct this.

        It does so if positions decay, or if they are in the group of their first layer's weight, as
        in `AdamW(model.parameters())`. An equal rate in another group is no sign of a mistake: it
        may be intended (`position_lr_scale=1`), an optimizer may need it (Prodigy), and timm's
        schedulers apply `lr_scale` only later.
        """
        if self.optimizer is None:
            return None
        group_of: dict[int, dict[str, Any]] = {}  # by the id of a parameter
        for group in self.optimizer.param_groups:
            group_of |= {id(tensor): group for tensor in group["params"]}
        are_in_one_group = False
        decay = 0.0  # the largest
        for parameter in parameters:
            own_group = group_of.get(id(parameter.tensor))
            if own_group is None or not parameter.tensor.requires_grad:
                continue
            first_layer = next(iter(parameter.layers.values()))
            are_in_one_group |= own_group is group_of.get(id(first_layer.weight))
            decay = max(decay, float(own_group.get("weight_decay") or 0))
        problems = []
        if are_in_one_group:
            problems.append("learn no faster than weights")
        if decay > 0:
            problems.append(f"decay towards the window's centre (weight_decay={decay:g})")
        if not problems:
            return None
        return (
            f"positions {' and '.join(problems)}; give the optimizer "
            "tuning.param_groups(model, lr=..., weight_decay=...) instead of model.parameters()"
        )

    def _warn_if_ratio_fell(self, ratio: float) -> None:
        """Warn, once, if positions learn less fast, relative to weights, than in earlier records.

        A rise is not an error: timm's schedulers apply `lr_scale` from their start on.
        """
        self._highest_ratio = max(ratio, self._highest_ratio)
        if ratio >= self._highest_ratio * (1 - RATIO_TOLERANCE) or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"the learning rate of positions is now {ratio:.3g} times that of weights, and was "
            f"{self._highest_ratio:.3g} times before; a scheduler that sets one rate for all "
            "groups does this (OneCycleLR, CyclicLR, SWALR, eta_min, min_lr); see "
            '"Schedulers and optimizers" in docs/training.md for what to write instead',
            stacklevel=4,  # the caller of `update`; `no_grad` is between
        )

    def _speed(self, name: str, positions: Tensor, step: int) -> float | None:
        if self._last_step is None or name not in self._last_positions:
            return None
        positions = in_double(positions)
        moves = positions - self._last_positions[name].to(positions)
        return _finite(moves.abs().mean() / (step - self._last_step))

    def _append(self, line: bytes) -> None:
        if self.path is None or not is_first_rank():
            return
        try:
            with self.path.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {one_line(error)}") from error


def read_track(path: str | os.PathLike[str]) -> tuple[TrackRecord, ...]:
    """Read the records that a `PositionTracker` wrote.

    A run that was killed and resumed has some steps twice in its file: when a step comes again, the
    records from that step on are replaced. An incomplete last line is ignored.

    Raises:
        CheckpointError: The file cannot be read, a line is not a record, or lines count different
            units; names the line.
    """
    try:
        lines = read_bytes(Path(path)).split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
    records: list[TrackRecord] = []
    for number, line in enumerate(lines[:-1], start=1):
        where = f"{path}: line {number} is not a record of a PositionTracker"
        record = TrackRecord.from_json(line, where)
        if records:
            _check_unit(path, number, record.unit, records[0])
        while records and records[-1].step >= record.step:
            records.pop()
        records.append(record)
    return tuple(records)


def _drop_incomplete_line(path: Path) -> None:
    """Remove what a killed run has written of a record, so that the next one begins a line."""
    complete = path.read_bytes().rpartition(b"\n")
    with path.open("r+b") as file:
        file.truncate(len(complete[0]) + len(complete[1]))


def _check_unit(path: object, number: int, unit: Unit, first: TrackRecord) -> None:
    """Refuse (CheckpointError) a line of a file whose first record counts another unit."""
    if unit != first.unit:
        raise CheckpointError(
            f"{path}: line {number} counts {unit}s, the lines before it {first.unit}s; record each "
            "training in a file of its own"
        )


def is_first_rank() -> bool:
    """True in the process that writes files and log lines for all processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return True


def _lr_ratio(positions: PositionParameter, rate_of: dict[int, float]) -> float | None:
    """Return the rate of positions relative to the rate of their first layer's weight, if known."""
    first_layer = next(iter(positions.layers.values()))
    positions_rate = rate_of.get(id(positions.tensor))
    weight_rate = rate_of.get(id(first_layer.weight))
    if positions_rate is None or not weight_rate:  # a schedule may end at 0
        return None
    return positions_rate / weight_rate


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
