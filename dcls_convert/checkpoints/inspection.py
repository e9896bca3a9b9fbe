"""Compute statistics of a checkpoint's positions: where its elements are. Builds no model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry import along_learnt_axes
from ..layers import position_statistics as statistics
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..records import Record
from ..weights.loading import describe_non_finite
from .folder import Checkpoint, read_tensors

# Dtypes of positions for which statistics are computed; torch cannot compare float8 numbers.
SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionSet:
    """One positions tensor of a plan, and its sigma if there is one."""

    layers: tuple[LayerPlan, ...]  # that use it; the first one has it

    @property
    def name(self) -> str:
        """The name of the tie group or of the layer."""
        return self.layers[0].tie_group or self.layers[0].name

    @property
    def parameters(self) -> dict[str, str]:
        """ "positions" (and "sigma") -> name in the weights file."""
        first = self.layers[0]
        return {kind: f"{first.name}.{kind}" for kind in first.position_kinds}

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Size of the window along each learnt axis, in cells."""
        first = self.layers[0]
        return along_learnt_axes(first.dilated_size, first.dense_axes)

    def describe_misfit(self, name: str, tensor: Tensor | None) -> str | None:
        """Say why there are no statistics of a stored tensor; None if there are."""
        shape = self.layers[0].position_shape
        if tensor is None:
            return f"{name} is missing"
        if tuple(tensor.shape) != shape or tensor.dtype not in SUPPORTED_DTYPES:
            return (
                f"{name} has shape {tuple(tensor.shape)} and is {tensor.dtype}; the plan has "
                f"{shape}, floating-point of 16 bits or more, for {self.name}"
            )
        return describe_non_finite(name, tensor, mask=False)


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
    return tuple(PositionSet(layers=tuple(group)) for group in position_groups(plan.layers))


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
    return inspect_state(checkpoint, dict(read_tensors(checkpoint.weights_path, names)))


def inspect_state(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> Inspection:
    """Return the same as `inspect_checkpoint`, from tensors that were read already."""
    plan = checkpoint.plan
    for position_set in position_sets(plan):
        for name in position_set.parameters.values():
            problem = position_set.describe_misfit(name, state.get(name))
            if problem is not None:
                raise CheckpointError(
                    f"{checkpoint.weights_path}: {problem}; dcls-convert verify lists all problems"
                )
    inspection = inspect_positions(plan, state, checkpoint.folder)
    return replace(inspection, provenance=checkpoint.provenance)


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
        tied=len(position_set.layers) > 1,
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
