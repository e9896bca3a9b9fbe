"""Make elements of a DCLS kernel from the cells of dense kernels, or at random positions.

A kernel line is the cells of one kernel along the learnt axes: for one output channel, one input
channel of its group and one cell of the dense axes. A layer has O x I x D kernel lines.

Axes: L layers of a tie group, O output channels, I input channels per group, D dense cells, K old
cells, C chosen cells, E elements, A learnt axes.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..depthwise.devices import in_double
from ..geometry import Grow, Pair, grid_positions, grow_of_axes, learnt_axes

POSITION_STD = 0.5  # cells; paper, section 3 "Positions initialization"

# Weights of each layer (O, I, *D, E), and the positions (A, O, I, *D, E) that they share.
Elements = tuple[Sequence[Tensor], Tensor]


def largest_elements(
    kernels: Sequence[Tensor],
    *,
    kernel_count: int,
    dilation: Sequence[int],
    size: Sequence[int],
    dense_axes: Sequence[int] = (),
    grow: Sequence[Grow] = (),
    effective: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the cells with the most energy, over all layers of a tie group, as elements.

    Kernels are (O, I, *kernel size). Energies are computed from `effective`, the kernels that the
    old convolutions compute with; by default, from `kernels`. Among cells of equal energy, the
    first are chosen.

    Returns:
        The weights of each layer (O, I, *D, E) and the positions (A, O, I, *D, E). The elements are
        in the order of the cells, at their old positions. If there are fewer cells than elements,
        the surplus elements have weight 0 and lie in the centre.
    """
    axes = learnt_axes(len(size), dense_axes)
    kernel_size = kernels[0].shape[2:]
    values = torch.stack([cells_last(kernel, axes) for kernel in kernels])  # (L, O, I, *D, K)
    effective_values = values
    if effective is not None:
        effective_values = torch.stack([cells_last(kernel, axes) for kernel in effective])
    energy = in_double(effective_values).square().sum(0)  # (O, I, *D, K)
    chosen_count = min(kernel_count, energy.shape[-1])
    by_energy = energy.sort(dim=-1, descending=True, stable=True).indices
    chosen = by_energy[..., :chosen_count].sort(dim=-1).values.to(values.device)  # (O, I, *D, C)
    filling = (0, kernel_count - chosen_count)  # zeros to add on the last axis: before, after
    weights: list[Tensor] = []
    for values_of_layer in values:
        weights.append(F.pad(values_of_layer.gather(-1, chosen), filling))
    grids: list[Sequence[float]] = []  # positions of the old cells along each learnt axis
    grows = grow_of_axes(grow, len(size))
    for axis in axes:
        grids.append(grid_positions(kernel_size[axis], dilation[axis], size[axis], grows[axis]))
    grid = list(itertools.product(*grids))
    positions_of_cells = torch.tensor(grid, dtype=values.dtype, device=values.device)  # (K, A)
    positions = positions_of_cells[chosen].movedim(-1, 0)  # (A, O, I, *D, C)
    return weights, F.pad(positions, filling)


def cells_last(kernel: Tensor, axes: Sequence[int]) -> Tensor:
    """Put the learnt axes last and flatten them: (O, I, *kernel size) -> (O, I, *D, K)."""
    last = [2 + axis for axis in axes]
    dense = sorted(set(range(2, kernel.dim())) - set(last))
    return kernel.permute(0, 1, *dense, *last).flatten(2 + len(dense))


def first_cells(kernel: Tensor, kernel_count: int, dense_axes: Sequence[int]) -> Tensor:
    """Return the first E cells of each kernel line: (O, I, *kernel size) -> (O, I, *D, E).

    If a line has fewer than E cells, its cells are repeated.
    """
    cells = cells_last(kernel, learnt_axes(kernel.dim() - 2, dense_axes))
    index = torch.arange(kernel_count, device=kernel.device) % cells.shape[-1]
    return cells.index_select(-1, index)  # faster than cells[..., index]


def random_positions(
    weight: Tensor,
    limits: Sequence[Pair],
    generator: torch.Generator,
    *,
    centre: Sequence[float] | None = None,
) -> Tensor:
    """Draw positions (A, *weight.shape).

    Args:
        weight: The weights of the elements.
        limits: The least and the greatest position along each learnt axis.
        generator: The source of randomness.
        centre: Draw from N(centre, 0.5 cells), as in the paper; without it, uniformly.
    """
    if weight.is_meta:
        return torch.empty(len(limits), *weight.shape, device="meta")
    # In float32 on the CPU, so that a seed gives the same positions for every dtype and device.
    drawn = torch.empty(len(limits), *weight.shape, device="cpu")
    for axis, (low, high) in enumerate(limits):
        if centre is None:
            drawn[axis].uniform_(low, high, generator=generator)
        else:
            drawn[axis].normal_(centre[axis], POSITION_STD, generator=generator).clamp_(low, high)
    return drawn
