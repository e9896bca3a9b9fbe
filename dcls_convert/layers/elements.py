"""The cells of dense kernels as elements of a DCLS kernel.

Axes: L layers of a tie group, O outputs, I inputs per group, D dense cells, K old cells, E elements, A learnt axes.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..depthwise.geometry import grid_positions
from .interpolation import learnt_axes, position_limits

POSITION_STD = 0.5  # cells; paper, section 3 "Positions initialization"

Elements = tuple[
    Sequence[Tensor], Tensor
]  # weights of each layer (O, I, *D, E), the positions (A, O, I, *D, E)


def largest_elements(
    kernels: Sequence[Tensor],
    *,
    kernel_count: int,
    dilation: Sequence[int],
    size: Sequence[int],
    dense_axes: Sequence[int] = (),
    effective: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The cells of kernels (O, I, *kernel size) with the most energy over the group, as convolved (`effective`).

    In their order and at their old places; of equal ones, the first. Elements beyond them have weight 0 in the centre.
    """
    axes = learnt_axes(len(size), dense_axes)
    kernel_size = kernels[0].shape[2:]
    cells = torch.stack([cells_last(kernel, axes) for kernel in kernels])  # (L, O, I, *D, K)
    deciding = (
        cells
        if effective is None
        else torch.stack([cells_last(kernel, axes) for kernel in effective])
    )
    energy = deciding.double().square().sum(0)  # (O, I, *D, K)
    kept = min(kernel_count, energy.shape[-1])
    chosen = (
        energy.sort(dim=-1, descending=True, stable=True).indices[..., :kept].sort(dim=-1).values
    )
    grids = [grid_positions(kernel_size[axis], dilation[axis], size[axis]) for axis in axes]
    places = torch.tensor(
        list(itertools.product(*grids)), dtype=cells.dtype, device=cells.device
    )  # (K, A)
    extra = 0, kernel_count - kept
    return [F.pad(layer.gather(-1, chosen), extra) for layer in cells], F.pad(
        places[chosen].movedim(-1, 0), extra
    )


def cells_last(kernel: Tensor, axes: Sequence[int]) -> Tensor:
    """(O, I, *kernel size) -> (O, I, *D, K): the learnt axes last, and flat."""
    last = [2 + axis for axis in axes]
    dense = [axis for axis in range(2, kernel.dim()) if axis not in last]
    return kernel.permute(0, 1, *dense, *last).flatten(2 + len(dense))


def first_cells(kernel: Tensor, kernel_count: int, dense_axes: Sequence[int]) -> Tensor:
    """(O, I, *kernel size) -> (O, I, *D, E): the first cells of each line, from the start again if need be."""
    cells = cells_last(kernel, learnt_axes(kernel.dim() - 2, dense_axes))
    index = torch.arange(kernel_count, device=kernel.device) % cells.shape[-1]
    return cells.index_select(-1, index)  # faster than cells[..., index]


def random_positions(
    weight: Tensor,
    size: Sequence[int],
    dense_axes: Sequence[int],
    generator: torch.Generator,
    *,
    uniform: bool,
) -> Tensor:
    """Positions (A, *weight.shape) inside a box of this size: uniform over it, or N(0, 0.5 cells) as in the paper."""
    axes = learnt_axes(len(size), dense_axes)
    if weight.is_meta:
        return torch.empty(len(axes), *weight.shape, device="meta")
    # In float32 on the CPU, so that a seed means the same everywhere.
    drawn = torch.empty(len(axes), *weight.shape, device="cpu")
    for index, axis in enumerate(axes):
        low, high = position_limits(size[axis])
        if uniform:
            drawn[index].uniform_(low, high, generator=generator)
        else:
            drawn[index].normal_(0.0, POSITION_STD, generator=generator).clamp_(low, high)
    return drawn
