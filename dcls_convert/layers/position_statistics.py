"""Measure where elements are in their windows: at the border, overlapping, far from the centre.

No function here computes gradients. Axes: A learnt axes, *C kernels, E elements of one kernel.
Positions are in cells from the kernel centre.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..depthwise.devices import in_double
from ..geometry import Grow, grow_of_axes, position_limits

# Cells. If an element is nearer to a limit, most of it is in the window's outermost cells.
BORDER_MARGIN = 0.5
# Cells. Two elements that are nearer have most of their cells in common. A limit of 1 would count
# elements on neighbouring cells, as after a fit, as soon as training moves them at all.
OVERLAP_DISTANCE = 0.5
MAX_DISTANCES = 1 << 22  # computed at once: 16 MiB per axis in float32; one kernel may have more


def from_old_centre(positions: Tensor, old_centre: Sequence[float]) -> Tensor:
    """Count positions (A, ...) from the old kernel's centre instead of the window's centre."""
    centre = positions.new_tensor(old_centre)
    return positions - centre.reshape(-1, *[1] * (positions.dim() - 1))


def border_share(positions: Tensor, size: Sequence[int], grow: Sequence[Grow] = ()) -> float:
    """Return the share of elements (A, *C, E) within `BORDER_MARGIN` of a limit, or beyond it.

    Only limits that a larger window would move count: a window that grows to one side keeps its
    other end. `size` and `grow` (empty: to both sides) are along the learnt axes.
    """
    at_border = torch.zeros(positions.shape[1:], dtype=torch.bool, device=positions.device)
    grows = grow_of_axes(grow, len(size))
    for coordinate, cells, axis_grow in zip(_at_least_float32(positions), size, grows, strict=True):
        if cells > 1:  # along an axis of one cell, nothing can move
            low, high = position_limits(cells)
            if axis_grow != "ahead":
                at_border |= coordinate <= low + BORDER_MARGIN
            if axis_grow != "back":
                at_border |= coordinate >= high - BORDER_MARGIN
    return int(at_border.sum()) / max(at_border.numel(), 1)


def overlap_share(positions: Tensor) -> float:
    """Return the share of elements (A, *C, E) that overlap another element of their kernel.

    Two elements overlap if their Euclidean distance is below `OVERLAP_DISTANCE`.
    """
    kernels = _at_least_float32(positions).reshape(positions.shape[0], -1, positions.shape[-1])
    overlapping = 0
    for part in torch.split(kernels, max(1, MAX_DISTANCES // kernels.shape[-1] ** 2), 1):
        differences = part[..., :, None] - part[..., None, :]  # (A, c, E, E)
        near_counts = (differences.square().sum(0) < OVERLAP_DISTANCE**2).sum(-1)
        overlapping += int((near_counts > 1).sum())  # every element is near itself
    return overlapping / max(math.prod(positions.shape[1:]), 1)


def rms_per_axis(positions: Tensor) -> tuple[float, ...]:
    """Return the root mean square of positions (A, *C, E) along each learnt axis, in cells.

    It is the standard deviation about the centre, not about the mean.
    """
    mean_squares = [in_double(axis).square().mean() for axis in positions.detach()]
    return tuple(float(mean_square.sqrt()) for mean_square in mean_squares)


def mean_distance(positions: Tensor) -> float:
    """Return the mean distance (Euclidean, cells) of elements (A, *C, E) from the centre."""
    distances = torch.linalg.vector_norm(_at_least_float32(positions), dim=0)
    return float(in_double(distances).mean())


def _at_least_float32(positions: Tensor) -> Tensor:
    """Return positions in float32 at least; half precision would round their differences."""
    return positions.detach().to(torch.promote_types(positions.dtype, torch.float32))
