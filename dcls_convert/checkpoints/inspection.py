"""Where the elements of a checkpoint are: statistics of its positions. Builds no model."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ..errors import CheckpointError
from ..layers.interpolation import learnt_axes
from ..layers.position_statistics import (
    BORDER_MARGIN,
    OVERLAP_DISTANCE,
    border_share,
    mean_distance,
    overlap_share,
    spread,
)
from ..planning.plan import ConversionPlan, LayerPlan
from .folder import WEIGHTS, read_checked_stamp, read_folder, the_plan
from .records import write_json
from .stamp import read_tensors

INSPECTION_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionSet:
    """One positions tensor of a plan: of a tie group, or of a layer alone."""

    name: str  # of the tie group, or of the layer
    tied: bool
    layers: tuple[LayerPlan, ...]
    parameters: dict[str, str]  # "positions" (and "sigma") -> name in the weights file

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Cells of the window along the learnt axes."""
        size = self.layers[0].dilated_size
        return tuple(size[axis] for axis in learnt_axes(len(size), self.layers[0].dense_axes))


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRow:
    """Statistics of one positions tensor. Shares are of its elements; lengths in cells, from the kernel centre."""

    name: str
    tied: bool
    layers: tuple[str, ...]
    kernel_count: int
    dilated_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str
    kernels: int  # of one layer, cells of dense axes apart
    elements: int  # of one layer
    border_share: float
    overlap_share: float
    spread: tuple[float, ...]  # standard deviation along each learnt axis
    mean_distance: float
    mean_sigma: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Statistics of all positions of a checkpoint."""

    format: int = INSPECTION_FORMAT
    folder: str
    model: str | None
    border_margin: float = BORDER_MARGIN  # cells
    overlap_distance: float = OVERLAP_DISTANCE  # cells
    positions: tuple[PositionRow, ...]

    @property
    def elements(self) -> int:
        """Elements with a position of their own: those of a tie group once."""
        return sum(row.elements for row in self.positions)

    def share(self, name: str) -> float:
        """A share or a mean of the rows, over all elements."""
        return float(sum(getattr(row, name) * row.elements for row in self.positions)) / max(self.elements, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        total: dict[str, Any] = {"layers": sum(len(row.layers) for row in self.positions), "elements": self.elements}
        total |= {name: self.share(name) for name in ("border_share", "overlap_share", "mean_distance")}
        return {**_ADAPTER.dump_python(self, mode="json"), "total": total}

    def to_json(self) -> str:
        return write_json(self.to_dict())


_ADAPTER = TypeAdapter(Inspection)


def position_sets(plan: ConversionPlan) -> tuple[PositionSet, ...]:
    """Every positions tensor that the plan's checkpoint holds, in the order of the layers; none where it is folded."""
    if plan.folded:
        return ()
    sets: dict[str, PositionSet] = {}
    for layer in plan.layers:
        if layer.tie_group is None:
            own = {name: f"{layer.name}.{name}" for name in layer.shared_parameters}
            sets[f"\0{layer.name}"] = PositionSet(name=layer.name, tied=False, layers=(layer,), parameters=own)
        elif layer.tie_group not in sets:
            group = plan.group(layer.tie_group)
            names = {key: f"{group.owner}.{name}".lstrip(".") for key, name in group.parameters.items()}
            members = tuple(member for member in plan.layers if member.tie_group == group.name)
            sets[group.name] = PositionSet(name=group.name, tied=True, layers=members, parameters=names)
    return tuple(sets.values())


def inspect_folder(folder: str | Path) -> Inspection:
    """Statistics of a checkpoint's positions. Reads the plan and the positions alone; builds no model.

    Takes a folder of timm's own savers too.

    Raises:
        CheckpointError: Not such a folder, damaged, or folded, so that there are no positions any more.
    """
    folder = Path(folder)
    config = read_folder(folder)
    plan, path = the_plan(config, folder), folder / WEIGHTS
    if plan.folded:
        raise CheckpointError(f"{folder}: is folded into plain convolutions and has no positions any more")
    read_checked_stamp(path, config)
    sets = position_sets(plan)
    wanted = {name for place in sets for name in place.parameters.values()}
    tensors = dict(read_tensors(path, wanted))
    rows = tuple(_row(place, {key: _tensor(tensors, place, key, path) for key in place.parameters}) for place in sets)
    return Inspection(folder=str(folder), model=plan.model, positions=rows)


def _tensor(tensors: dict[str, Tensor], place: PositionSet, key: str, path: Path) -> Tensor:
    name, shape = place.parameters[key], place.layers[0].position_shape
    if name not in tensors:
        raise CheckpointError(f"{path}: lacks {name}, the {key} of {place.name}")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} has shape {tuple(tensor.shape)} and is {tensor.dtype}; "
            f"the plan has {shape}, of floating-point numbers"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{path}: {name} has values that are not finite; dcls-convert verify lists all problems")
    return tensor


def _row(place: PositionSet, tensors: dict[str, Tensor]) -> PositionRow:
    layer, positions, sigma = place.layers[0], tensors["positions"], tensors.get("sigma")
    return PositionRow(
        name=place.name,
        tied=place.tied,
        layers=tuple(member.name for member in place.layers),
        kernel_count=layer.kernel_count,
        dilated_size=layer.dilated_size,
        dense_axes=layer.dense_axes,
        interpolation=layer.interpolation,
        kernels=math.prod(positions.shape[1:-1]),
        elements=math.prod(positions.shape[1:]),
        border_share=border_share(positions, place.learnt_size),
        overlap_share=overlap_share(positions),
        spread=spread(positions),
        mean_distance=mean_distance(positions),
        mean_sigma=None if sigma is None else float(sigma.mean(dtype=torch.float64)),
    )
