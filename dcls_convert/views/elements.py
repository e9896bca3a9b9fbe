"""Where the elements of each positions tensor are, and the kernels with the most energy that they make in each layer.

Axes: A learnt axes, O output channels, I input channels per group, E elements, N kernels that are shown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoints.inspection import Inspection, PositionRow, position_sets
from ..errors import CheckpointError
from ..layers.construction import construct_kernel
from ..layers.dcls_conv import DclsConvNd
from ..layers.interpolation import learnt_axes
from ..layers.position_statistics import BORDER_MARGIN, bins, outside_share
from ..planning.plan import ConversionPlan, LayerPlan

AXES = ("depth", "row", "column")  # the last ones, for fewer dimensions
FINE = (
    3  # bins in a cell along each axis; odd, so that an element on a cell is in the middle of a bin
)
MOST_BINS = 150_000  # of all heat maps together; above, a bin is a cell
MOST_KERNELS = 32  # shown of a layer
MOST_NUMBERS = 1_200_000  # cells and coordinates of all shown kernels together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionPicture:
    """The elements of a tie group, or of an untied layer. Each is counted once, whatever the number of layers."""

    row: PositionRow  # the statistics
    axes: tuple[str, ...]  # names of the learnt axes
    size: tuple[int, ...]  # cells of the window along the learnt axes
    bins_per_cell: int
    heat: Tensor  # elements in each bin of the last two learnt axes, of which the first is 1 where there is one alone
    histograms: tuple[tuple[int, ...], ...]  # elements in each bin along each learnt axis
    extents: tuple[
        tuple[int, ...], ...
    ]  # cells of the old kernels along the learnt axes, in the middle of the window
    outside: float  # share of the elements outside the largest of the old kernels
    even_share: (
        float  # of elements spread evenly, that within the border's margin of the window's limit
    )


def heat_map(positions: Tensor, size: Sequence[int], per_cell: int) -> Tensor:
    """Elements in each bin of the last two learnt axes, of one row where there is one alone; positions (A, ..., E)."""
    along = [
        bins(axis.flatten(), side, per_cell) for axis, side in zip(positions, size, strict=True)
    ]
    rows, columns = [1, *(side * per_cell for side in size)][-2:]
    row, column = [torch.zeros_like(along[0]), *along][-2:]
    return torch.bincount(row * columns + column, minlength=rows * columns).reshape(rows, columns)


def position_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], inspection: Inspection
) -> tuple[PositionPicture, ...]:
    """A picture for each positions tensor of the plan, in the inspection's order."""
    sets, pictures = position_sets(plan), []
    cells = sum(math.prod(place.learnt_size[-2:]) for place in sets)
    per_cell = FINE if cells * FINE**2 <= MOST_BINS else 1
    for place, row in zip(sets, inspection.positions, strict=True):
        dims, size, positions = (
            len(row.dilated_size),
            place.learnt_size,
            state[place.parameters["positions"]],
        )
        learnt = learnt_axes(dims, row.dense_axes)
        olds = [tuple(old.extents[axis] for axis in learnt) for old in place.layers]
        histograms = (
            heat_map(axis[None], [side], per_cell)
            for axis, side in zip(positions, size, strict=True)
        )
        picture = PositionPicture(
            row=row,
            axes=tuple(AXES[axis - dims] for axis in learnt),
            size=size,
            bins_per_cell=per_cell,
            heat=heat_map(positions, size, per_cell),
            histograms=tuple(tuple(histogram[0].tolist()) for histogram in histograms),
            extents=tuple(dict.fromkeys(olds)),
            outside=outside_share(positions, [max(sides) for sides in zip(*olds, strict=True)]),
            even_share=1
            - math.prod(max(0.0, 1 - 2 * BORDER_MARGIN / (side - 1)) for side in size if side > 1),
        )
        pictures.append(picture)
    return tuple(pictures)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerKernels:
    """Those kernels of a layer that have the most energy (sum of the squared cells), the first the most."""

    name: str
    total: int  # kernels of the layer
    energy_share: float  # of the shown kernels, of the energy of all
    channels: tuple[tuple[int, int], ...]  # output channel, and input channel of its group
    cells: Tensor  # (N, rows, columns); of three axes, the sum over the first
    positions: Tensor  # (N, E, 2); row and column of the elements, in cells from the centre
    weights: Tensor  # (N, E)


@torch.no_grad()
def kernel_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], model: nn.Module | None
) -> tuple[LayerKernels, ...]:
    """The kernels of each layer, with the weights that the rebuilt model standardises; without a model, as stored."""
    sets = {layer.name: place for place in position_sets(plan) for layer in place.layers}
    numbers = sum(
        math.prod(layer.dilated_size) + 3 * math.prod(layer.position_shape[3:])
        for layer in plan.layers
    )
    most = max(1, min(MOST_KERNELS, MOST_NUMBERS // max(numbers, 1)))
    pictures = []
    for layer in plan.layers:
        module = None if model is None else model.get_submodule(layer.name)
        name, shape = f"{layer.name}.weight", layer.position_shape[1:]
        if isinstance(module, DclsConvNd):
            weight = module.form.effective_weight(module, module.weight)
        elif name in state and tuple(state[name].shape) == shape:
            weight = state[name]
        else:
            stored = tuple(state[name].shape) if name in state else "missing"
            raise CheckpointError(f"{name} is {stored}, the plan has {shape}")
        shared = {
            kind: state[name].float().cpu() for kind, name in sets[layer.name].parameters.items()
        }
        pictures.append(_strongest(layer, weight.float().cpu(), most=most, **shared))
    return tuple(pictures)


def _strongest(
    layer: LayerPlan, weight: Tensor, positions: Tensor, sigma: Tensor | None = None, *, most: int
) -> LayerKernels:
    """Weights (O, I, *dense, E), positions and sigma (A, O, I, *dense, E)."""
    size, dense = layer.dilated_size, layer.dense_axes
    kernels = construct_kernel(
        weight, positions, size, interpolation=layer.interpolation, sigma=sigma, dense_axes=dense
    ).flatten(0, 1)
    energies = kernels.double().square().flatten(1).sum(1)
    chosen = energies.argsort(descending=True, stable=True)[:most]
    shown, inputs = kernels[chosen], layer.in_channels // layer.groups
    learnt = iter(positions.flatten(1, 2)[:, chosen])
    weights = weight.flatten(0, 1)[chosen]
    axes = [torch.zeros_like(weights)]  # the row, where there is one axis alone
    for axis, side in enumerate(size):
        if axis in learnt_axes(len(size), dense):
            axes.append(next(learnt))
        else:
            place = [side if axis == other else 1 for other in dense]
            cells = torch.arange(side, dtype=positions.dtype) - side // 2
            axes.append(cells.reshape(1, *place, 1).expand_as(weights))
    return LayerKernels(
        name=layer.name,
        total=len(energies),
        energy_share=float(energies[chosen].sum() / energies.sum())
        if float(energies.sum()) > 0
        else 1.0,
        channels=tuple((channel // inputs, channel % inputs) for channel in chosen.tolist()),
        cells=shown.unsqueeze(1)
        if shown.dim() == 2
        else shown.sum(1)
        if shown.dim() == 4
        else shown,
        positions=torch.stack([axis.flatten(1) for axis in axes[-2:]], -1),
        weights=weights.flatten(1),
    )
