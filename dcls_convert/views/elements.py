"""Data for pictures of elements: heat maps of positions, and each layer's strongest kernels.

Axes: A learnt axes, O output channels, I input channels per group, E elements, N shown kernels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoints.inspection import Inspection, PositionRow, PositionSet, position_sets
from ..errors import CheckpointError
from ..geometry import learnt_axes
from ..layers.construction import construct_kernel
from ..layers.dcls_conv import DclsConvNd
from ..layers.position_statistics import bin_indices
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan

AXES = ("depth", "row", "column")  # kernels of fewer axes use the last names
# Odd, so that an element at the centre of a cell is in the middle of a bin.
FINE_BINS_PER_CELL = 3
MAX_BINS = 150_000  # in all heat maps together; beyond it, a bin is a whole cell
BINS_PER_CELL_OF_DISTANCE = 2
MAX_KERNELS = 8  # shown per layer
MAX_KERNEL_NUMBERS = 400_000  # bound on cells, coordinates and weights of all shown kernels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionPicture:
    """The elements of a tie group, or of an untied layer.

    An element that several layers share is counted once.
    """

    row: PositionRow  # the statistics
    axes: tuple[str, ...]  # names of the learnt axes
    size: tuple[int, ...]  # cells of the window along the learnt axes
    bins_per_cell: int  # along each axis
    heat: Tensor  # (rows, columns); elements per bin of the last two learnt axes, see `heat_map`
    histograms: tuple[tuple[int, ...], ...]  # elements in each bin along each learnt axis
    # Elements at each distance from the kernel's centre, in bins of half a cell.
    distances: tuple[int, ...]
    # Extents of the old kernels along the learnt axes, in cells, without duplicates.
    old_kernel_sizes: tuple[tuple[int, ...], ...]


def heat_map(positions: Tensor, size: Sequence[int], per_cell: int) -> Tensor:
    """Count the elements in each bin of the last two learnt axes.

    Args:
        positions: (A, ..., E), in cells from the kernel's centre.
        size: Cells of the window along each learnt axis.
        per_cell: Bins in a cell along each axis.

    Returns:
        (rows, columns); one row if there is only one axis.
    """
    bins_along = []
    for axis, side in zip(positions, size, strict=True):
        bins_along.append(bin_indices(axis.flatten(), side, per_cell))
    column = bins_along[-1]
    columns = size[-1] * per_cell
    if len(bins_along) == 1:
        row = torch.zeros_like(column)
        rows = 1
    else:
        row = bins_along[-2]
        rows = size[-2] * per_cell
    return torch.bincount(row * columns + column, minlength=rows * columns).reshape(rows, columns)


def position_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], inspection: Inspection
) -> tuple[PositionPicture, ...]:
    """Return a picture of each positions tensor of the plan, in the inspection's order."""
    sets = position_sets(plan)
    cells = sum(math.prod(position_set.learnt_size[-2:]) for position_set in sets)
    per_cell = 1
    if cells * FINE_BINS_PER_CELL**2 <= MAX_BINS:
        per_cell = FINE_BINS_PER_CELL
    pictures = []
    for position_set, row in zip(sets, inspection.positions, strict=True):
        positions = state[position_set.parameters["positions"]]
        pictures.append(_position_picture(position_set, row, positions, per_cell))
    return tuple(pictures)


def _position_picture(
    position_set: PositionSet, row: PositionRow, positions: Tensor, per_cell: int
) -> PositionPicture:
    """Return the picture of one positions tensor (A, O, I, *dense axes, E)."""
    size = position_set.learnt_size
    dims = len(row.dilated_size)
    learnt = learnt_axes(dims, row.dense_axes)
    old_extents = []
    for layer in position_set.layers:
        old_extents.append(tuple(layer.extents[axis] for axis in learnt))
    histograms = []
    for axis, side in zip(positions, size, strict=True):
        counts = heat_map(axis[None], [side], per_cell)[0]
        histograms.append(tuple(counts.tolist()))
    return PositionPicture(
        row=row,
        axes=tuple(AXES[axis - dims] for axis in learnt),
        size=size,
        bins_per_cell=per_cell,
        heat=heat_map(positions, size, per_cell),
        histograms=tuple(histograms),
        distances=_distances(positions, size),
        old_kernel_sizes=tuple(dict.fromkeys(old_extents)),
    )


def _distances(positions: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Count the elements by their distance from the kernel's centre.

    Args:
        positions: (A, ..., E), in cells from the centre.
        size: Cells of the window along each learnt axis. The last bin also contains all elements
            outside the window.
    """
    distances = positions.double().square().sum(0).sqrt()
    farthest = math.hypot(*size) / 2
    bins = (BINS_PER_CELL_OF_DISTANCE * distances.clamp(max=farthest)).long()
    return tuple(torch.bincount(bins.flatten()).tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerKernels:
    """The kernels of a layer with the most energy (sum of squared cells), strongest first."""

    name: str
    total: int  # kernels of the layer
    energy_share: float  # energy of the shown kernels / energy of all kernels
    channels: tuple[tuple[int, int], ...]  # output channel, input channel within its group
    cells: Tensor  # (N, rows, columns); kernels of three axes are summed over the first
    positions: Tensor  # (N, E, 2); row and column of the elements, in cells from the centre
    weights: Tensor  # (N, E)


@torch.no_grad()
def kernel_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], model: nn.Module | None
) -> tuple[LayerKernels, ...]:
    """Return the strongest kernels of each layer.

    Args:
        plan: The conversion's plan.
        state: The converted model's state dict.
        model: The rebuilt model, which standardises weights if the old network did. If it is
            None, kernels are made from the stored weights.

    Raises:
        CheckpointError: A layer's weight is missing, or has another shape than in the plan.
    """
    parameters = {}  # names of the positions and sigma, by layer
    for position_set in position_sets(plan):
        for layer in position_set.layers:
            parameters[layer.name] = position_set.parameters
    max_kernels = _kernels_per_layer(plan)
    pictures = []
    for layer in plan.layers:
        weight = _element_weights(layer, state, model).float().cpu()
        names = parameters[layer.name]
        positions = state[names["positions"]].float().cpu()
        sigma = None
        if "sigma" in names:
            sigma = state[names["sigma"]].float().cpu()
        pictures.append(_strongest_kernels(layer, weight, positions, sigma, max_kernels))
    return tuple(pictures)


def _kernels_per_layer(plan: ConversionPlan) -> int:
    """Return the number of kernels shown per layer, which bounds the size of the page."""
    numbers = 0  # cells, coordinates and weights of one kernel of each layer
    for layer in plan.layers:
        cells = math.prod(layer.dilated_size)
        elements = math.prod(layer.position_shape[3:])
        numbers += cells + 3 * elements  # two coordinates and a weight per element
    affordable = MAX_KERNEL_NUMBERS // max(numbers, 1)
    return max(1, min(MAX_KERNELS, affordable))


def _element_weights(
    layer: LayerPlan, state: Mapping[str, Tensor], model: nn.Module | None
) -> Tensor:
    """Return the weights (O, I, *dense, E) from which the layer's kernels are constructed."""
    if model is not None:
        module = model.get_submodule(layer.name)
        if isinstance(module, DclsConvNd):
            return module.traits.effective_weight(module, module.weight)
    name = f"{layer.name}.weight"
    shape = layer.position_shape[1:]
    if name not in state:
        raise CheckpointError(f"{name} is missing, the plan has {shape}")
    stored = tuple(state[name].shape)
    if stored != shape:
        raise CheckpointError(f"{name} is {stored}, the plan has {shape}")
    return state[name]


def _strongest_kernels(
    layer: LayerPlan, weight: Tensor, positions: Tensor, sigma: Tensor | None, max_kernels: int
) -> LayerKernels:
    """Return the kernels of a layer with the most energy.

    Args:
        layer: The layer's plan.
        weight: (O, I, *dense, E).
        positions, sigma: (A, O, I, *dense, E).
        max_kernels: Number of kernels to return; all if the layer has fewer.
    """
    kernels = construct_kernel(
        weight,
        positions,
        layer.dilated_size,
        interpolation=layer.interpolation,
        sigma=sigma,
        dense_axes=layer.dense_axes,
    ).flatten(0, 1)  # (O * I, *window)
    energies = kernels.double().square().flatten(1).sum(1)  # (O * I,)
    chosen = energies.argsort(descending=True, stable=True)[:max_kernels]  # (N,)
    total_energy = energies.sum()
    energy_share = 1.0
    if total_energy > 0:
        energy_share = float(energies[chosen].sum() / total_energy)
    inputs_per_group = layer.in_channels // layer.groups
    channels = [divmod(index, inputs_per_group) for index in chosen.tolist()]
    weights = weight.flatten(0, 1)[chosen]  # (N, *dense, E)
    coordinates = _row_and_column(layer, positions.flatten(1, 2)[:, chosen])
    return LayerKernels(
        name=layer.name,
        total=len(energies),
        energy_share=energy_share,
        channels=tuple(channels),
        cells=_as_rows_and_columns(kernels[chosen]),
        positions=coordinates,
        weights=weights.flatten(1),
    )


def _row_and_column(layer: LayerPlan, positions: Tensor) -> Tensor:
    """Return the rows and columns of elements: positions (A, N, *dense, E) -> (N, elements, 2).

    They are the coordinates along the last two axes. Along a dense axis, the elements are at the
    cells. Elements of kernels with one axis are in row 0.
    """
    dims = len(layer.dilated_size)
    learnt = learnt_axes(dims, layer.dense_axes)
    coordinates = [torch.zeros_like(positions[0])]  # the row, if there is only one axis
    for axis, side in enumerate(layer.dilated_size):
        if axis in learnt:
            coordinates.append(positions[learnt.index(axis)])
        else:
            shape = [1] * positions[0].dim()  # broadcasts to (N, *dense, E)
            shape[1 + layer.dense_axes.index(axis)] = side
            cells = torch.arange(side, dtype=positions.dtype) - side // 2
            coordinates.append(cells.reshape(shape).expand_as(positions[0]))
    row, column = coordinates[-2:]
    return torch.stack([row.flatten(1), column.flatten(1)], -1)


def _as_rows_and_columns(kernels: Tensor) -> Tensor:
    """Reshape kernels (N, *window) to (N, rows, columns).

    Kernels of one axis become a row; kernels of three axes are summed over the first.
    """
    if kernels.dim() == 2:
        return kernels.unsqueeze(1)
    if kernels.dim() == 4:
        return kernels.sum(1)
    return kernels
