"""Where elements are in their windows: at the border, on top of one another, how far from the centre; no gradients.

Axes: A learnt axes, *C kernels, E elements of one kernel. Positions are in cells from the kernel centre.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from .interpolation import position_limits

BORDER_MARGIN = (
    0.5  # cells; nearer to a limit, an element's largest part is in the window's outermost cells
)
OVERLAP_DISTANCE = (
    1.0  # cells; nearer elements share cells, and the paper's repulsive loss pushes them apart
)
MOST_DISTANCES = 1 << 22  # held at once: 16 MiB in float32


def border_share(positions: Tensor, size: Sequence[int]) -> float:
    """The share of elements (A, *C, E) within `BORDER_MARGIN` of a limit, or beyond; `size` is along learnt axes."""
    at_border = torch.zeros(positions.shape[1:], dtype=torch.bool, device=positions.device)
    for coordinate, side in zip(_exact(positions), size, strict=True):
        if side > 1:  # along an axis of one cell, nothing can move
            low, high = position_limits(side)
            at_border |= (coordinate <= low + BORDER_MARGIN) | (coordinate >= high - BORDER_MARGIN)
    return int(at_border.sum()) / max(at_border.numel(), 1)


def outside_share(positions: Tensor, sides: Sequence[int]) -> float:
    """Share of elements, of positions (A, ..., E), outside the middle of the window that has so many cells."""
    reach = (
        torch.tensor(sides, device=positions.device).reshape(-1, *[1] * (positions.dim() - 1)) / 2
    )
    return float((positions.abs() > reach).any(0).double().mean())


def overlap_share(positions: Tensor) -> float:
    """The share of elements (A, *C, E) with another one of their kernel nearer than `OVERLAP_DISTANCE` (Euclidean)."""
    kernels = _exact(positions).reshape(positions.shape[0], -1, positions.shape[-1])
    overlapping = 0
    for _, _, squares in pairs(kernels, MOST_DISTANCES):
        overlapping += int(
            ((squares < OVERLAP_DISTANCE**2).sum(-1) > 1).sum()
        )  # every element is near itself
    return overlapping / max(math.prod(positions.shape[1:]), 1)


def spread(positions: Tensor) -> tuple[float, ...]:
    """Standard deviation along each learnt axis about the kernel centre, in cells: (A, *C, E) -> A numbers."""
    return tuple(
        float(coordinate.double().square().mean().sqrt()) for coordinate in positions.detach()
    )


def mean_distance(positions: Tensor) -> float:
    """Mean Euclidean distance of the elements from the kernel centre, in cells; positions (A, *C, E)."""
    return float(torch.linalg.vector_norm(_exact(positions), dim=0).mean(dtype=torch.float64))


def bins(coordinate: Tensor, size: int, bins_per_cell: int) -> Tensor:
    """The bin of each finite coordinate; bin 0 begins half a cell before the first one, and the outermost are open."""
    low = position_limits(size)[0] - 0.5
    return (
        ((_exact(coordinate) - low) * bins_per_cell)
        .floor()
        .clamp(0, size * bins_per_cell - 1)
        .long()
    )


def pairs(
    kernels: Tensor, most_distances: int
) -> Iterator[tuple[tuple[slice, slice], list[Tensor], Tensor]]:
    """All pairs in kernels (A, C, E), in parts: the first ones' part of (C, E), differences, squared distances."""
    # Coordinate by coordinate: torch.cdist with matrix products is not exact, and without them slow for small kernels.
    count = kernels.shape[-1]
    at_once, rows = (
        max(1, most_distances // max(count * count, 1)),
        max(1, most_distances // max(count, 1)),
    )
    for start, first in itertools.product(
        range(0, kernels.shape[1], at_once), range(0, count, rows)
    ):
        part = slice(start, start + at_once), slice(first, first + rows)
        differences = [axis[part][..., None] - axis[part[0], None, :] for axis in kernels]
        yield part, differences, reduce(torch.add, map(torch.square, differences))


def _exact(positions: Tensor) -> Tensor:
    """Positions in float32 at least; half precision would round their differences."""
    return positions.detach().to(torch.promote_types(positions.dtype, torch.float32))
