"""The constructed kernels with the most energy of each layer, and the elements behind them.

Axes: O output channels, I input channels per group, E elements, N kernels that are shown.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoints.inspection import position_sets
from ..errors import CheckpointError
from ..layers.construction import construct_kernel
from ..layers.dcls_conv import DclsConvNd
from ..layers.interpolation import learnt_axes
from ..planning.plan import ConversionPlan, LayerPlan

MOST_KERNELS = 32  # shown of a layer
MOST_NUMBERS = 1_200_000  # cells and coordinates of all shown kernels together


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPicture:
    """One constructed kernel. Kernels of three axes are summed over the first."""

    channels: tuple[int, int]  # output channel, and input channel of its group
    energy: float  # sum of the squared cells
    cells: tuple[tuple[float, ...], ...]  # (rows, columns)
    elements: tuple[tuple[float, float, float], ...]  # row, column (cells from the centre), weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKernels:
    """Those kernels of a layer that have the most energy, the first the most."""

    name: str
    total: int  # kernels of the layer
    energy_share: float  # of the shown kernels, of the energy of all
    kernels: tuple[KernelPicture, ...]


def kernel_pictures(
    plan: ConversionPlan, state: Mapping[str, Tensor], model: nn.Module | None
) -> Iterator[LayerKernels]:
    """The kernels of each layer, one layer at a time.

    Args:
        plan: Of the checkpoint; not folded.
        state: Its tensors.
        model: The rebuilt model, whose layers may standardise their weights. None: the weights as they are stored.

    Raises:
        CheckpointError: A weight is missing or has another shape than the plan says.
    """
    shared = {
        layer.name: {kind: state[name] for kind, name in place.parameters.items()}
        for place in position_sets(plan)
        for layer in place.layers
    }
    numbers = sum(math.prod(layer.dilated_size) + 3 * _elements_of_kernel(layer) for layer in plan.layers)
    most = max(1, min(MOST_KERNELS, MOST_NUMBERS // max(numbers, 1)))
    for layer in plan.layers:
        weight = _weight(layer, state, model)
        yield _strongest(layer, weight, most=most, **shared[layer.name])


def _elements_of_kernel(layer: LayerPlan) -> int:
    return layer.kernel_count * math.prod(layer.dilated_size[axis] for axis in layer.dense_axes)


@torch.no_grad()
def _weight(layer: LayerPlan, state: Mapping[str, Tensor], model: nn.Module | None) -> Tensor:
    """The effective weights of the elements (O, I, *dense, E)."""
    module = None if model is None else model.get_submodule(layer.name)
    if isinstance(module, DclsConvNd):
        return module.form.effective_weight(module, module.weight)
    name, shape = f"{layer.name}.weight", layer.position_shape[1:]
    if name not in state or tuple(state[name].shape) != shape:
        found = tuple(state[name].shape) if name in state else "missing"
        raise CheckpointError(f"{name} is {found}, the plan has {shape}")
    return state[name]


@torch.no_grad()
def _strongest(
    layer: LayerPlan, weight: Tensor, positions: Tensor, sigma: Tensor | None = None, *, most: int
) -> LayerKernels:
    weight, positions = weight.float().cpu(), positions.float().cpu()
    kernels = construct_kernel(
        weight,
        positions,
        layer.dilated_size,
        interpolation=layer.interpolation,
        sigma=None if sigma is None else sigma.float().cpu(),
        dense_axes=layer.dense_axes,
    ).flatten(0, 1)
    energies = kernels.double().square().flatten(1).sum(1)
    chosen = energies.argsort(descending=True, stable=True)[:most]
    planes = _plane(kernels[chosen])
    coordinates = _coordinates(layer, positions.flatten(1, 2)[:, chosen])
    weights = weight.flatten(0, 1)[chosen].flatten(1)
    inputs = layer.in_channels // layer.groups
    pictures = [
        KernelPicture(
            channels=(channel // inputs, channel % inputs),
            energy=energy,
            cells=tuple(map(tuple, cells)),
            elements=tuple(zip(*places, values, strict=True)),
        )
        for channel, energy, cells, places, values in zip(
            chosen.tolist(),
            energies[chosen].tolist(),
            planes.tolist(),
            coordinates.movedim(1, 0).tolist(),
            weights.tolist(),
            strict=True,
        )
    ]
    share = float(energies[chosen].sum() / energies.sum()) if float(energies.sum()) > 0 else 1.0
    return LayerKernels(name=layer.name, total=len(energies), energy_share=share, kernels=tuple(pictures))


def _plane(kernels: Tensor) -> Tensor:
    """(N, *size) -> (N, rows, columns)."""
    return kernels.unsqueeze(1) if kernels.dim() == 2 else kernels.sum(1) if kernels.dim() == 4 else kernels


def _coordinates(layer: LayerPlan, positions: Tensor) -> Tensor:
    """Row and column of every element: (A, N, *dense, E) -> (2, N, elements)."""
    size, learnt = layer.dilated_size, learnt_axes(len(layer.dilated_size), layer.dense_axes)
    axes = []
    for axis in range(len(size)):
        if axis in learnt:
            axes.append(positions[learnt.index(axis)])
            continue
        place = [1] * (positions.dim() - 1)
        place[1 + layer.dense_axes.index(axis)] = size[axis]
        cells = torch.arange(size[axis], dtype=positions.dtype) - size[axis] // 2
        axes.append(cells.reshape(place).expand_as(positions[0]))
    flat = [axis.flatten(1) for axis in axes[-2:]]
    return torch.stack(flat if len(flat) > 1 else [torch.zeros_like(flat[0]), *flat])
