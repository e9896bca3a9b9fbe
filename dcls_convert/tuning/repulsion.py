"""The repulsive loss of a positions tensor, in bounded memory.

Axes: A learnt axes, *C kernels (output channel, input channel, cell of a dense axis), E elements of one kernel.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

REACH = 1.0  # cells; elements that far apart or farther do not repel each other
MOST_DISTANCES = 1 << 20  # held at once: 4 MiB in float32, and a few tensors of that size


def repulsion(positions: Tensor, most_distances: int = MOST_DISTANCES) -> Tensor:
    """Mean over all pairs of elements of a kernel, and over all kernels, of relu(1 - distance in cells).

    Args:
        positions: (A, *C, E), in cells. Each cell of a dense axis is a kernel by itself.
        most_distances: Bounds the memory, of backward too: that many distances between elements are held at once.

    Returns:
        A scalar from 0 (no two elements of a kernel nearer than one cell) to 1 (all at one place); 0 for kernels of one
        element. In float32 where positions are narrower.

    Elements at one place get no gradient from each other: the distance has none there, and no direction is the right
    one. Can be differentiated once.
    """
    value: Tensor = _Repulsion.apply(positions, most_distances)
    return value


class _Repulsion(torch.autograd.Function):
    """Computes the gradient along with the value, so that backward keeps no tensor larger than the positions."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, most_distances: int) -> Tensor:
        wants_gradient = bool(ctx.needs_input_grad[0])
        exact = positions.detach().to(torch.promote_types(positions.dtype, torch.float32))
        axes, count = exact.shape[0], exact.shape[-1]
        kernels = exact.reshape(axes, -1, count)  # (A, C, E)
        ordered_pairs = max(count * (count - 1) * kernels.shape[1], 1)
        total = exact.new_zeros(())
        gradient = torch.zeros_like(kernels) if wants_gradient else None
        for here, rows in _chunks(kernels.shape[1], count, most_distances):
            total += _chunk(kernels, here, rows, gradient)
        if gradient is not None:
            ctx.save_for_backward((gradient / ordered_pairs).reshape(positions.shape).to(positions.dtype))
        return total / ordered_pairs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None


def _chunks(kernels: int, count: int, most_distances: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the kernels, and of the elements whose distances to all others of their kernel are computed."""
    at_once = max(1, most_distances // max(count * count, 1))
    rows = max(1, most_distances // max(count, 1))
    for first in range(0, kernels, at_once):
        for row in range(0, count, rows):
            yield slice(first, first + at_once), slice(row, min(row + rows, count))


def _chunk(kernels: Tensor, here: slice, rows: slice, gradient: Tensor | None) -> Tensor:
    """Sum of relu(1 - distance) over ordered pairs, the first element in `rows`; fills in its gradient (A, C, E)."""
    squares = torch.zeros((), dtype=kernels.dtype, device=kernels.device)
    for coordinate in kernels[:, here]:
        squares = squares + _differences(coordinate, rows).square()  # (C, rows, E)
    index = torch.arange(rows.stop - rows.start, device=kernels.device)
    squares[:, index, index + rows.start] = math.inf  # an element does not repel itself
    distances = squares.sqrt()
    if gradient is not None:
        # Each pair counts twice here, and both times moves its first element: hence the 2.
        slopes = torch.where((distances < REACH) & (distances > 0), -2 / distances, 0.0)
        for axis, coordinate in enumerate(kernels[:, here]):
            gradient[axis, here, rows] = (slopes * _differences(coordinate, rows)).sum(-1)
    return (REACH - distances).relu().sum()


def _differences(coordinate: Tensor, rows: slice) -> Tensor:
    """(C, E) -> (C, rows, E)."""
    return coordinate[:, rows, None] - coordinate[:, None, :]
