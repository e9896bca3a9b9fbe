"""Compute statistics of a checkpoint's positions: where its elements are. Builds no model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry import along_learnt_axes, position_limits
from ..layers import position_statistics as statistics
from ..layers.interpolation import find_interpolation
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..records import Record
from ..weights.loading import describe_non_finite
from .folder import Checkpoint, read_tensors
from .stamp import read_stamp

# Dtypes of positions for which statistics are computed; torch cannot compare float8 numbers.
SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionSet:
    """One positions tensor of a plan, which belongs to a tie group or to an untied layer."""

    name: str  # of the tie group or the layer
    tied: bool
    layers: tuple[LayerPlan, ...]
    parameters: dict[str, str]  # "positions" (and "sigma") -> name in the weights file

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Size of the window along each learnt axis, in cells."""
        first = self.layers[0]
        return along_learnt_axes(first.dilated_size, first.dense_axes)

    def misfits(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield a message for each tensor that is missing or has a wrong shape or dtype."""
        shape = self.layers[0].position_shape
        allowed = f"the plan has {shape}, floating-point of 16 bits or more, for {self.name}"
        for name in self.parameters.values():
            tensor = state.get(name)
            if tensor is None:
                yield f"{name} is missing; {allowed}"
            elif tuple(tensor.shape) != shape or tensor.dtype not in SUPPORTED_DTYPES:
                yield f"{name} has shape {tuple(tensor.shape)} and is {tensor.dtype}; {allowed}"

    def out_of_range(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield messages about positions outside the window and sigmas below their minimum.

        Call this only if `misfits` yields nothing for `state`.
        """
        name = self.parameters["positions"]
        positions = state[name]
        for axis, (side, values) in enumerate(zip(self.learnt_size, positions, strict=True)):
            low, high = position_limits(side)
            count = int(((values < low) | (values > high)).sum())
            if count:
                where = f"outside the window along axis {axis}, which goes from {low} to {high}"
                yield f"{name} has {count} of {values.numel()} elements {where}"
        if "sigma" in self.parameters:
            yield from self._sigmas_below_minimum(state[self.parameters["sigma"]])

    def _sigmas_below_minimum(self, sigma: Tensor) -> Iterator[str]:
        """Yield a message if there are sigmas below their minimum."""
        minimum = find_interpolation(self.layers[0].interpolation).min_sigma or 0.0
        # Clamping rounded the minimum to the tensor's dtype, so compare in this dtype.
        count = int((sigma < torch.tensor(minimum, dtype=sigma.dtype)).sum())
        if count:
            yield (
                f"{self.parameters['sigma']} has {count} of {sigma.numel()} sigmas "
                f"below {minimum:g} cells, the minimum"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRow:
    """Statistics of one positions tensor.

    Shares are fractions of its elements; lengths are in cells.
    """

    name: str
    tied: bool
    layers: tuple[str, ...]
    kernel_count: int
    dilated_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str
    kernels: int  # per layer; each cell along the dense axes counts as a kernel of its own
    elements: int  # per layer
    border_share: float
    overlap_share: float
    spread: tuple[float, ...]  # root mean square along each learnt axis
    mean_distance: float  # from the kernel centre
    mean_sigma: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Record):
    """Statistics of all positions of a checkpoint, and how it was converted, if that is known.

    `dcls-convert inspect` shows it.
    """

    format: int = 1
    folder: str
    model: str | None
    border_margin: float = statistics.BORDER_MARGIN  # cells
    overlap_distance: float = statistics.OVERLAP_DISTANCE  # cells
    positions: tuple[PositionRow, ...]
    provenance: dict[str, Any] | None = None

    @property
    def elements(self) -> int:
        """Number of elements with a position of their own; those of a tie group count once."""
        return sum(row.elements for row in self.positions)

    def mean_over_elements(self, name: str) -> float:
        """Return the mean of a field of the rows, weighted by their numbers of elements."""
        total = sum(getattr(row, name) * row.elements for row in self.positions)
        return float(total) / max(self.elements, 1)

    def to_dict(self) -> dict[str, Any]:
        total = {
            "layers": sum(len(row.layers) for row in self.positions),
            "elements": self.elements,
            "border_share": self.mean_over_elements("border_share"),
            "overlap_share": self.mean_over_elements("overlap_share"),
            "mean_distance": self.mean_over_elements("mean_distance"),
        }
        return {**Record.to_dict(self), "total": total}


def position_sets(plan: ConversionPlan) -> tuple[PositionSet, ...]:
    """Return the positions tensors of a plan in the order of its layers; none if it is folded."""
    if plan.folded:
        return ()
    sets = []
    for layers in position_groups(plan.layers):
        first = layers[0]
        sets.append(
            PositionSet(
                name=first.tie_group or first.name,
                tied=first.tie_group is not None,
                layers=tuple(layers),
                parameters={key: f"{first.name}.{key}" for key in first.shared_parameters},
            )
        )
    return tuple(sets)


def plan_with_positions(checkpoint: Checkpoint) -> ConversionPlan:
    """Return the plan of a checkpoint that has positions.

    Raises:
        CheckpointError: There is no plan, or the model is folded.
    """
    plan = checkpoint.plan
    if plan.folded:
        raise CheckpointError(
            f"{checkpoint.folder}: is folded into plain convolutions, which have no positions"
        )
    return plan


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Compute statistics of a checkpoint's positions. No other weights are read.

    Raises:
        CheckpointError: The checkpoint is damaged, or folded.
    """
    names = set[str]()
    for position_set in position_sets(plan_with_positions(checkpoint)):
        names.update(position_set.parameters.values())
    checkpoint.check_stamp(read_stamp(checkpoint.weights_path))
    return inspect_state(checkpoint, dict(read_tensors(checkpoint.weights_path, names)))


def inspect_state(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> Inspection:
    """Return the same as `inspect_checkpoint`, from tensors that were read already."""
    plan = checkpoint.plan
    problem = next(_problems(plan, state), None)
    if problem is not None:
        raise CheckpointError(
            f"{checkpoint.weights_path}: {problem}; dcls-convert verify lists all problems"
        )
    inspection = inspect_positions(plan, state, checkpoint.folder)
    return replace(inspection, provenance=checkpoint.provenance)


def _problems(plan: ConversionPlan, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield messages about positions for which no statistics can be computed."""
    sets = position_sets(plan)
    for position_set in sets:
        yield from position_set.misfits(state)
    for position_set in sets:
        for name in position_set.parameters.values():
            problem = describe_non_finite(name, state[name], mask=False)
            if problem is not None:
                yield problem


def inspect_positions(
    plan: ConversionPlan, state: Mapping[str, Tensor], folder: str | Path
) -> Inspection:
    """Compute statistics of positions in a state dict; they must be finite and fit the plan."""
    rows = tuple(_row(position_set, state) for position_set in position_sets(plan))
    return Inspection(folder=str(folder), model=plan.model, positions=rows)


def _row(position_set: PositionSet, state: Mapping[str, Tensor]) -> PositionRow:
    """Compute the statistics of one positions tensor."""
    positions = state[position_set.parameters["positions"]]
    mean_sigma = None
    if "sigma" in position_set.parameters:
        sigma = state[position_set.parameters["sigma"]]
        mean_sigma = float(sigma.mean(dtype=torch.float64))
    first = position_set.layers[0]
    return PositionRow(
        name=position_set.name,
        tied=position_set.tied,
        layers=tuple(layer.name for layer in position_set.layers),
        kernel_count=first.kernel_count,
        dilated_size=first.dilated_size,
        dense_axes=first.dense_axes,
        interpolation=first.interpolation,
        kernels=math.prod(positions.shape[1:-1]),
        elements=math.prod(positions.shape[1:]),
        border_share=statistics.border_share(positions, position_set.learnt_size),
        overlap_share=statistics.overlap_share(positions),
        spread=statistics.rms_per_axis(positions),
        mean_distance=statistics.mean_distance(positions),
        mean_sigma=mean_sigma,
    )
