"""Statistics of a checkpoint's positions: where its elements are. Builds no model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layers import position_statistics as statistics
from ..layers.interpolation import find_interpolation, learnt_axes, position_limits
from ..networks.weights import not_finite
from ..planning.plan import ConversionPlan, LayerPlan, taken_from
from ..records import Record
from .folder import check_stamp, read_folder, read_stamp, read_tensors, the_plan

# torch cannot compare float8 numbers.
COMPARED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionSet:
    """One positions tensor of a plan: that of a tie group, or of an untied layer."""

    name: str  # of the tie group, or of the layer
    tied: bool
    layers: tuple[LayerPlan, ...]
    parameters: dict[str, str]  # "positions" (and "sigma") -> name in the weights file

    @property
    def learnt_size(self) -> tuple[int, ...]:
        size = self.layers[0].dilated_size
        return tuple(size[axis] for axis in learnt_axes(len(size), self.layers[0].dense_axes))

    def misfits(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        """Messages about tensors that are missing, not to be compared, or of another shape than the plan says."""
        shape = self.layers[0].position_shape
        for name in self.parameters.values():
            tensor = state.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in COMPARED:
                problem = (
                    "is missing"
                    if tensor is None
                    else f"has shape {tuple(tensor.shape)} and is {tensor.dtype}"
                )
                yield f"{name} {problem}; the plan has {shape}, floating-point of 16 bits or more, for {self.name}"

    def outside(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        """Messages about positions outside the window and sigmas below their minimum; for tensors without `misfits`."""
        positions = state[self.parameters["positions"]]
        sigma = state.get(self.parameters.get("sigma", ""))
        for axis, (side, values) in enumerate(zip(self.learnt_size, positions, strict=True)):
            low, high = position_limits(side)
            if count := int(((values < low) | (values > high)).sum()):
                where = f"outside the window along axis {axis}, which goes from {low} to {high}"
                yield f"{self.parameters['positions']} has {count} of {values.numel()} elements {where}"
        least = find_interpolation(self.layers[0].interpolation).min_sigma or 0.0
        # Clamping rounded the minimum to the tensor's dtype; compare in this dtype.
        if sigma is not None and (
            count := int((sigma < torch.tensor(least, dtype=sigma.dtype)).sum())
        ):
            yield f"{self.parameters['sigma']} has {count} of {sigma.numel()} sigmas below {least:g} cells, the minimum"


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRow:
    """Statistics of one positions tensor. Shares are fractions of its elements; lengths are in cells."""

    name: str
    tied: bool
    layers: tuple[str, ...]
    kernel_count: int
    dilated_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str
    kernels: int  # of one layer; each cell along a dense axis counts as one
    elements: int  # of one layer
    border_share: float
    overlap_share: float
    spread: tuple[float, ...]  # standard deviation along each learnt axis
    mean_distance: float  # from the kernel centre
    mean_sigma: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Record):
    """Statistics of all positions of a checkpoint."""

    format: int = 1
    folder: str
    model: str | None
    border_margin: float = statistics.BORDER_MARGIN  # cells
    overlap_distance: float = statistics.OVERLAP_DISTANCE  # cells
    positions: tuple[PositionRow, ...]

    @property
    def elements(self) -> int:
        """Elements with a position of their own; those of a tie group count once."""
        return sum(row.elements for row in self.positions)

    def share(self, name: str) -> float:
        """The mean of a row's field over all elements."""
        return float(sum(getattr(row, name) * row.elements for row in self.positions)) / max(
            self.elements, 1
        )

    def to_dict(self) -> dict[str, Any]:
        total: dict[str, Any] = {
            "layers": sum(len(row.layers) for row in self.positions),
            "elements": self.elements,
        }
        total |= {
            name: self.share(name) for name in ("border_share", "overlap_share", "mean_distance")
        }
        return {**Record.to_dict(self), "total": total}


def position_sets(plan: ConversionPlan) -> tuple[PositionSet, ...]:
    """In the order of the layers; none if the plan is folded."""
    if plan.folded:
        return ()
    sets = []
    for layer in plan.layers:
        if layer.tie_group is None:
            own = {name: f"{layer.name}.{name}" for name in layer.shared_parameters}
            sets.append(PositionSet(name=layer.name, tied=False, layers=(layer,), parameters=own))
        elif (group := plan.group(layer.tie_group)).layers[0] == layer.name:
            names = {
                key: f"{group.owner}.{name}".lstrip(".") for key, name in group.parameters.items()
            }
            members = tuple(member for member in plan.layers if member.tie_group == group.name)
            sets.append(PositionSet(name=group.name, tied=True, layers=members, parameters=names))
    return tuple(sets)


def inspect_folder(folder: str | Path) -> Inspection:
    """Reads the plan and the positions alone; CheckpointError: no checkpoint, damaged, or folded."""
    folder = Path(folder)
    config = read_folder(folder)
    plan = the_plan(config)
    path = config.weights
    if plan.folded:
        raise CheckpointError(
            f"{folder}: is folded into plain convolutions, which have no positions"
        )
    check_stamp(read_stamp(path), config)
    sets = position_sets(plan)
    state = dict(read_tensors(path, {name for place in sets for name in place.parameters.values()}))
    problems = [problem for place in sets for problem in place.misfits(state)]
    problems += filter(
        None, (not_finite(name, tensor, mask=False) for name, tensor in state.items())
    )
    if problems:
        raise CheckpointError(f"{path}: {problems[0]}; dcls-convert verify lists all problems")
    return inspect_positions(plan, state, folder)


def inspect_positions(
    plan: ConversionPlan, state: Mapping[str, Tensor], folder: str | Path
) -> Inspection:
    """Statistics of the positions in a state dict, which are finite and have the plan's shapes."""
    rows = []
    for place in position_sets(plan):
        layer = place.layers[0]
        positions = state[place.parameters["positions"]]
        sigma = state.get(place.parameters.get("sigma", ""))
        row = PositionRow(
            **taken_from(layer, PositionRow) | {"name": place.name},
            tied=place.tied,
            layers=tuple(member.name for member in place.layers),
            kernels=math.prod(positions.shape[1:-1]),
            elements=math.prod(positions.shape[1:]),
            border_share=statistics.border_share(positions, place.learnt_size),
            overlap_share=statistics.overlap_share(positions),
            spread=statistics.spread(positions),
            mean_distance=statistics.mean_distance(positions),
            mean_sigma=None if sigma is None else float(sigma.mean(dtype=torch.float64)),
        )
        rows.append(row)
    return Inspection(folder=str(folder), model=plan.model, positions=tuple(rows))
