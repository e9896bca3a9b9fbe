"""The profiles of the interpolations: how an element spreads along an axis of the window.

An element spreads by the product of its profiles, one along each learnt axis. Each profile is
normalised to sum to 1 inside the window.

The derivative of a profile by the position must not vanish at the centres of cells: starts from old
kernels place elements there, and these elements would never move. At a kink of the profile, the
derivative is the right-hand one. At the upper border of the window, it is the left-hand one, which
points inward.

Axes: *C kernels, E kernel elements, A learnt axes. `cells` are positions counted from the first
cell of the window.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..depthwise.eager import uses_cpu_implementation
from .interpolation import INTERPOLATIONS, Interpolation

WindowSize = tuple[int, ...]  # along the learnt axes, in cells
# cells and sigma (*C, E), length of the window -> (*C, E, length)
Profile = Callable[[Tensor, Tensor, int], Tensor]


def per_axis(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one number per learnt axis, shaped to broadcast with positions: (A, 1, 1, ...)."""
    # Filled on the device: a copy from the host would wait for the device, and cannot be part of a
    # CUDA graph.
    filled = [torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(filled).reshape(-1, *[1] * (like.dim() - 1))


def cells_of(positions: Tensor, size: WindowSize) -> Tensor:
    """Count positions (A, *C, E) from the window's first cell instead of its centre."""
    if len(set(size)) == 1:
        return positions + size[0] // 2
    return positions + per_axis([length // 2 for length in size], positions)


def construct_by_profiles(
    weight: Tensor,
    cells: Tensor,
    sigma: Tensor | None,
    size: WindowSize,
    interpolation: Interpolation,
) -> Tensor:
    """Construct kernels: weight (*C, E), cells and sigma (A, *C, E) -> (*C, *size).

    Each element is spread by the product of its normalised profiles. The result has derivatives of
    any order.
    """
    profiles: list[Tensor] = []
    for axis, length in enumerate(size):
        width = None
        if sigma is not None:
            width = clamped(sigma[axis], interpolation.min_sigma or 0, math.inf)
        inside = clamped(cells[axis], 0, length - 1)
        profiles.append(normalised_profile(interpolation, inside, length, width))
    spread = weight.unsqueeze(-1)  # (*C, E, 1)
    for profile in profiles[:-1]:
        products = spread.unsqueeze(-1) * profile.unsqueeze(-2)
        spread = products.flatten(-2)  # (*C, E, product of lengths)
    if uses_cpu_implementation(weight):
        # One matrix product per kernel. In 1-D and 2-D, this avoids a tensor of elements x window.
        kernel = spread.transpose(-1, -2) @ profiles[-1]
    else:
        # A matrix product on a GPU might round its factors to 11 bits (TF32).
        kernel = (spread.unsqueeze(-1) * profiles[-1].unsqueeze(-2)).sum(-3)
    return kernel.reshape(*weight.shape[:-1], *size)


def bilinear_by_profiles(weight: Tensor, cells: Tensor, size: WindowSize) -> Tensor:
    """Construct bilinear kernels: weight (*C, E), cells (A, *C, E) -> (*C, *size)."""
    return construct_by_profiles(weight, cells, None, size, INTERPOLATIONS["bilinear"])


def clamped(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp `value` to [low, high], with the gradient of the identity.

    The gradient of a plain clamp is 0 beyond a limit, so a value would be stuck there.
    """
    fixed = value.detach()
    return fixed.clamp(low, high) + (value - fixed)


def normalised_profile(
    interpolation: Interpolation, cells: Tensor, length: int, sigma: Tensor | None = None
) -> Tensor:
    """Return the normalised profile: (*C, E) -> (*C, E, length).

    Without `sigma`, elements have the initial sigma.
    """
    if sigma is None:
        sigma = torch.full_like(cells, interpolation.initial_sigma or 1.0)
    value = PROFILES[interpolation.name](cells, sigma, length)
    return value / value.sum(-1, keepdim=True)


def _grid(cells: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=cells.device, dtype=cells.dtype)


def _triangle(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """Return relu(sigma - |u - cell|) for all cells u of the window.

    The derivative is right-hand at kinks, and points inward at the upper border.
    """
    fixed_sigma = sigma.detach().unsqueeze(-1)  # (*C, E, 1)
    distance = (_grid(cells, length) - cells.detach().unsqueeze(-1)).abs()  # (*C, E, length)
    value = (fixed_sigma - distance).relu()
    slope_by_sigma = (distance <= fixed_sigma).to(value.dtype)
    # The values of these two are 0. They carry the gradients of the position and of sigma.
    zero_by_position = (cells - cells.detach()).unsqueeze(-1)
    zero_by_sigma = sigma.unsqueeze(-1) - fixed_sigma
    slope = _triangle_slope(cells, sigma, length)
    return value + slope * zero_by_position + slope_by_sigma * zero_by_sigma


def _triangle_slope(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    centre = cells.detach().unsqueeze(-1)
    width = sigma.detach().unsqueeze(-1)
    offset = _grid(cells, length) - centre  # (*C, E, length)

    def where_both(first: Tensor, second: Tensor) -> Tensor:
        # Not `&`, which coremltools does not support.
        return torch.logical_and(first, second).to(offset.dtype)

    right_hand = where_both(offset > 0, offset <= width) - where_both(offset > -width, offset <= 0)
    left_hand = where_both(offset >= 0, offset < width) - where_both(offset >= -width, offset < 0)
    return torch.where(centre >= length - 1, left_hand, right_hand)


def _gaussian(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """Return exp(-((u - cell) / sigma)^2 / 2) for all cells u of the window."""
    offset = _grid(cells, length) - cells.unsqueeze(-1)
    return (-0.5 * (offset / sigma.unsqueeze(-1)) ** 2).exp()


# Differentiable functions that return how much of an element each cell gets, before normalisation.
# For an interpolation without a sigma, the function gets a sigma of 1.
PROFILES: dict[str, Profile] = {
    "bilinear": _triangle,
    "triangle": _triangle,
    "gaussian": _gaussian,
}
