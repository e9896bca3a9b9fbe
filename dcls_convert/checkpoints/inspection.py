"""Compute statistics of a folder's positions: where its elements are. Builds no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry import Grow
from ..layers import position_statistics as statistics
from ..planning.layer_plan import LayerPlan, position_groups
from ..planning.plan import ConversionPlan
from ..records import Record
from ..weights.loading import describe_non_finite
from .folder import OpenedFolder
from .stored_weights import read_state


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
    grow: tuple[Grow, ...]  # along each axis; empty if all grow to both sides
    dense_axes: tuple[int, ...]
    interpolation: str
    kernels: int  # per layer; each cell along the dense axes counts as a kernel of its own
    elements: int  # per layer
    border_share: float
    overlap_share: float
    # Spread and distance count from the window's centre or, if the window grows to one side, from
    # the old kernel's.
    spread: tuple[float, ...]  # root mean square along each learnt axis
    mean_distance: float
    mean_sigma: float | None
    mean_move: float | None = None  # distance from the start; None if no start was given
    largest_move: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Record):
    """Statistics of all positions of a folder, and how it was converted, if that is known.

    The command `dcls-convert inspect` shows an inspection.
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
        """Number of distinct elements; elements that tied layers share count once."""
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


def plan_with_positions(opened: OpenedFolder) -> ConversionPlan:
    """Return the plan of a folder that has positions.

    Raises:
        CheckpointError: There is no plan, or the model is folded.
    """
    plan = opened.plan
    if plan.folded:
        raise CheckpointError(
            f"{opened.folder}: is folded into plain convolutions, which have no positions"
        )
    return plan


def inspect_state(
    opened: OpenedFolder, state: Mapping[str, Tensor], start: OpenedFolder | None = None
) -> Inspection:
    """Compute statistics of a folder's positions.

    Args:
        opened: The folder.
        state: Its tensors.
        start: The folder from which its training started, to say how far elements moved.

    Raises:
        CheckpointError: The model is folded, a tensor does not fit the plan, or the start's
            positions do not fit.
    """
    plan = plan_with_positions(opened)
    start_positions = None if start is None else _positions_of_start(start)
    for layer, *_ in position_groups(plan.layers):
        for name in layer.position_names.values():
            problem = _describe_misfit(layer, name, state.get(name))
            if problem is not None:
                raise CheckpointError(
                    f"{opened.weights_path}: {problem}; dcls-convert verify lists all problems"
                )
    return Inspection(
        folder=str(opened.folder),
        model=plan.model,
        positions=tuple(
            _row(layers, state, start_positions) for layers in position_groups(plan.layers)
        ),
        provenance=opened.provenance,
    )


def _positions_of_start(start: OpenedFolder) -> dict[str, Tensor]:
    """Return the start's positions by name, measured from the centres of the old kernels."""
    state = read_state(start)
    positions = {}
    for first, *_ in position_groups(plan_with_positions(start).layers):
        name = first.position_names["positions"]
        if name in state:
            positions[name] = statistics.from_old_centre(state[name], first.old_centre)
    return positions


def _describe_misfit(layer: LayerPlan, name: str, tensor: Tensor | None) -> str | None:
    """Say why statistics of a stored tensor cannot be computed; None if they can."""
    if tensor is None:
        return f"{name} is missing"
    if tuple(tensor.shape) != layer.position_shape:
        return f"{name} has shape {tuple(tensor.shape)}, the plan has {layer.position_shape}"
    return describe_non_finite(name, tensor, mask=False)


def _row(
    layers: Sequence[LayerPlan],
    state: Mapping[str, Tensor],
    start: Mapping[str, Tensor] | None,
) -> PositionRow:
    """Compute the statistics of positions that layers share; the first layer owns them."""
    first = layers[0]
    tensors = {attribute: state[name] for attribute, name in first.position_names.items()}
    positions = tensors["positions"]
    mean_sigma = None
    if "sigma" in tensors:
        mean_sigma = float(tensors["sigma"].mean(dtype=torch.float64))
    from_centre = statistics.from_old_centre(positions, first.old_centre)
    mean_move = None
    largest_move = None
    if start is not None:
        name = first.position_names["positions"]
        problem = _describe_misfit(first, name, start.get(name))
        if problem is not None:
            raise CheckpointError(f"not the start of this checkpoint's training: {problem}")
        moves = from_centre.double() - start[name].double()  # (A, O, I, *dense, E)
        mean_move = statistics.mean_distance(moves)
        largest_move = float(moves.norm(dim=0).max())
    return PositionRow(
        name=first.group_name,
        tied=len(layers) > 1,
        layers=tuple(layer.name for layer in layers),
        kernel_count=first.kernel_count,
        dilated_size=first.dilated_size,
        grow=first.grow,
        dense_axes=first.dense_axes,
        interpolation=first.interpolation,
        kernels=math.prod(positions.shape[1:-1]),
        elements=math.prod(positions.shape[1:]),
        border_share=statistics.border_share(positions, first.learnt_size, first.learnt_grow),
        overlap_share=statistics.overlap_share(positions),
        spread=statistics.rms_per_axis(from_centre),
        mean_distance=statistics.mean_distance(from_centre),
        mean_sigma=mean_sigma,
        mean_move=mean_move,
        largest_move=largest_move,
    )
