"""Bilinear kernel construction by torch's operations, with derivatives of any order.

Axes: *C channels (any number of axes, with one kernel for each entry), E kernel elements, A learnt
axes. `cells` are positions counted from the window's first cell.

Each function gives the same kernel and the same gradients. `bilinear` says when it is used.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WindowSize = tuple[int, ...]  # along the learnt axes, in cells


def per_axis(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one number per learnt axis, shaped to broadcast with positions: (A, 1, 1, ...)."""
    # Filled on the device: a copy from the host would wait for the device, and cannot be part of a
    # CUDA graph.
    filled = [torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(filled).reshape(-1, *[1] * (like.dim() - 1))


def clamped(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp `value` to [low, high], with the gradient of the identity.

    The gradient of a plain clamp is 0 beyond a limit, so a value would be stuck there.
    """
    fixed = value.detach()
    return fixed.clamp(low, high) + (value - fixed)


def construct_by_scatter(weight: Tensor, cells: Tensor, size: WindowSize) -> Tensor:
    """Construct kernels: weight (*C, E), cells (A, *C, E) -> (*C, *size); sides of 2 cells or more.

    An element adds to 2^A cells, the corners of the square around it. One scattered addition adds
    the same corner of all elements.
    """
    # For each corner, over the axes so far: its index in the flat window, and its part of the
    # weight.
    corners = [(torch.zeros_like(weight, dtype=torch.long), weight)]
    for coordinate, length in zip(cells.unbind(), size, strict=True):
        inside = clamped(coordinate, 0, length - 1)
        # At most length - 2: at the upper border, the fraction is then 1, and the derivative
        # points inward. NaN becomes index 0; the fraction is still NaN.
        lower = inside.detach().floor().clamp(0, length - 2).nan_to_num(0.0)
        lower_index = lower.long()
        lower_share = 1 - (inside - lower)
        upper_share = inside - lower
        corners_with_axis: list[tuple[Tensor, Tensor]] = []
        for index, part in corners:
            first_index = index * length
            corners_with_axis.append((first_index + lower_index, part * lower_share))
            corners_with_axis.append((first_index + (lower_index + 1), part * upper_share))
        corners = corners_with_axis
    flat = weight.new_zeros(*weight.shape[:-1], math.prod(size))  # (*C, cells of the window)
    for index, part in corners:
        flat = flat.scatter_add(-1, index, part)
    return flat.reshape(*weight.shape[:-1], *size)


def construct_by_broadcasting(
    weight: Tensor, cells: Tensor, size: WindowSize, *, differentiable: bool = True
) -> Tensor:
    """Construct kernels: weight (*C, E), cells (A, *C, E) -> (*C, *size); sides of 2 cells or more.

    Each cell is a sum over all elements, most of which have a share of 0 there.
    """
    # For derivatives, weights and coordinates are expanded over the window first. Then each
    # gradient is a single sum of products over the window, and a compiler fuses them into one loop.
    ones = [1] * len(size)
    whole_shape = (*weight.shape, *size)
    kernel = weight.reshape(*weight.shape, *ones)
    if differentiable:
        kernel = kernel.expand(whole_shape)
    for axis, (coordinate, length) in enumerate(zip(torch.split(cells, 1), size, strict=True)):
        grid = torch.arange(length, dtype=weight.dtype, device=weight.device)
        grid = grid.reshape(length, *ones[axis + 1 :])
        inside = coordinate.detach().clamp(0, length - 1).reshape(*weight.shape, *ones)
        share = (1 - (grid - inside).abs()).relu()  # (*C, E, length, 1, ...)
        if differentiable:
            # The derivative must be right-hand at cells, and point inward at the upper border. The
            # derivatives of relu and abs do not do so.
            steps_up = grid - inside.floor().clamp(max=length - 2)
            slope = (steps_up == 1).to(share.dtype) - (steps_up == 0).to(share.dtype)
            zero_with_gradient = (coordinate - coordinate.detach()).reshape(*weight.shape, *ones)
            share = share + slope * zero_with_gradient.expand(whole_shape)
        kernel = kernel * share
    return kernel.sum(-1 - len(size))
