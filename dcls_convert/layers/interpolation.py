"""Kernel construction: (weight, positions, sigma) to the dense kernel that an ordinary convolution takes.

Axes: O output channels, I input channels per group, E kernel elements, A learnt axes, H x W dilated kernel size.
`positions[0]` belongs to the first learnt axis (the row in 2-D), in cells from the kernel centre, which is cell
`size // 2` for odd and even sizes alike. Paper: Dilated convolution with learnable spacings, arXiv:2112.03740.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .bilinear import bilinear_kernel, needs_plain_operations

MIN_GAUSSIAN_SIGMA = 0.27  # cells; below it, an element between cells loses its gradient. DCLS 0.1.1
INITIAL_GAUSSIAN_SIGMA = 0.5  # cells; 0.23 + 0.27 in DCLS 0.1.1
MIN_TRIANGLE_SIGMA = 1.0  # cells; the triangle of half-width 1 is the bilinear interpolation. DCLS 0.1.1
INITIAL_TRIANGLE_SIGMA = 1.0  # cells; DCLS 0.1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolation:
    """One way to spread an element over the cells around its position."""

    construct: Callable[[Tensor, Tensor, Tensor | None, Sequence[int]], Tensor]
    profile: Callable[[Tensor, Tensor, int], Tensor] | None = None  # along one axis, before it is normalised to sum 1
    min_sigma: float | None = None  # cells; None: the interpolation has no sigma
    initial_sigma: float | None = None  # cells
    exact_on_cells: bool = False  # whether an element in the middle of a cell starts in that cell alone

    @property
    def has_sigma(self) -> bool:
        return self.min_sigma is not None


def position_limits(size: int) -> tuple[int, int]:
    """The first and last cell of a window of `size` cells, counted from its centre: (-8, 8) for 17, (-4, 3) for 8."""
    return -(size // 2), (size - 1) // 2


def learnt_axes(dims: int, dense_axes: Sequence[int] = ()) -> tuple[int, ...]:
    """The spatial axes along which elements have a position, in the order of `positions[0], positions[1], ...`."""
    return tuple(axis for axis in range(dims) if axis not in dense_axes)


def construct_kernel(
    weight: Tensor,
    positions: Tensor,
    size: Sequence[int],
    *,
    interpolation: str = "bilinear",
    sigma: Tensor | None = None,
    dense_axes: Sequence[int] = (),
) -> Tensor:
    """The dense kernel of a DCLS layer: every element spread over the cells around its position, overlaps added.

    Args:
        weight: (O, I, E); with dense axes of D cells, (O, I, D, E) and so on.
        positions: (A, *weight.shape), in cells from the kernel centre. Outside the window, the border is taken.
        size: Dilated kernel size, one entry for every spatial axis.
        interpolation: "bilinear" (the paper's eq. 2-4), "triangle" or "gaussian" (versions "max" and "gauss" of the
            authors' package, arXiv:2306.00817), the last two normalised to sum 1 inside the window.
        sigma: As positions, in cells: the triangle's half-width (at least 1), the Gaussian's deviation (at least 0.27).
        dense_axes: Spatial axes that are not learnt but dense: each of their cells has its own E elements (the paper's
            N-MD kernels).

    Returns:
        (O, I, *size) in the dtype of weight; computed in float32 where that is narrower, also under autocast.

    Gradients are the paper's Algorithm 2 everywhere: at integer positions the right-hand derivative, at the upper
    border, and beyond it, the derivative that points inward.

    Raises:
        ValueError: Shapes that do not belong together, an unknown interpolation, sigma missing or superfluous.
    """
    if len(set(dense_axes)) != len(dense_axes) or not set(dense_axes) <= set(range(len(size))):
        raise ValueError(f"dense_axes={tuple(dense_axes)} must be different axes from 0 to {len(size) - 1}")
    axes = learnt_axes(len(size), dense_axes)
    learnt = [size[axis] for axis in axes]
    method = find_interpolation(interpolation)
    _check_shapes(weight, positions, size, axes, sigma, method, interpolation)
    dtype = torch.promote_types(_at_least_float32(weight), _at_least_float32(positions))
    with _full_precision(weight.device.type):
        spread = None if sigma is None else sigma.to(dtype)
        kernel = method.construct(weight.to(dtype), positions.to(dtype), spread, learnt)
    order = [axis for axis in range(len(size)) if axis not in axes] + list(axes)
    spatial = [2 + order.index(axis) for axis in range(len(size))]
    return kernel.permute(0, 1, *spatial).to(weight.dtype)  # (O, I, *size)


def find_interpolation(name: str) -> Interpolation:
    """The interpolation of that name; ValueError names those there are."""
    if name not in INTERPOLATIONS:
        raise ValueError(f"interpolation={name!r} is not known; it is one of {', '.join(INTERPOLATIONS)}")
    return INTERPOLATIONS[name]


def spread_sum(positions: Tensor, sigma: Tensor | None, size: Sequence[int], interpolation: str) -> Tensor:
    """What an element's spread sums to over the window before it is normalised: (A, ...) -> (...).

    Args:
        positions: In cells from the kernel centre, inside the window.
        sigma: As positions, where the interpolation has one.
        size: Of the window along the learnt axes.
        interpolation: Its name.
    """
    total = torch.ones_like(positions[0])
    profile = find_interpolation(interpolation).profile
    if profile is not None and sigma is not None:
        for axis, length in enumerate(size):
            total = total * profile(_cells(positions[axis], length), sigma[axis], length).sum(-1)
    return total


def clamped(value: Tensor, low: float, high: float) -> Tensor:
    """`value` inside [low, high], with the gradient of the identity, so that nothing gets stuck beyond a limit."""
    fixed = value.detach()
    return fixed.clamp(low, high) + (value - fixed)


def _check_shapes(
    weight: Tensor,
    positions: Tensor,
    size: Sequence[int],
    axes: Sequence[int],
    sigma: Tensor | None,
    method: Interpolation,
    name: str,
) -> None:
    dense = tuple(size[axis] for axis in range(len(size)) if axis not in axes)
    if weight.dim() != 3 + len(dense) or tuple(weight.shape[2:-1]) != dense:
        wanted = ", ".join(["out", "in/groups", *map(str, dense), "count"])
        raise ValueError(f"weight has shape {tuple(weight.shape)}; with size={tuple(size)} it must be ({wanted})")
    wanted_shape = (len(axes), *weight.shape)
    if tuple(positions.shape) != wanted_shape:
        raise ValueError(f"positions have shape {tuple(positions.shape)}; for this weight they must be {wanted_shape}")
    if method.has_sigma != (sigma is not None):
        raise ValueError(f"{name} interpolation {'needs a' if method.has_sigma else 'has no'} sigma")
    if sigma is not None and tuple(sigma.shape) != wanted_shape:
        raise ValueError(f"sigma has shape {tuple(sigma.shape)}; for this weight it must be {wanted_shape}")


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: at 8 cells from the centre, bfloat16 positions are a sixteenth of a cell apart."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    """No autocast inside: the matrix products of the construction would run in half precision."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _cells(positions: Tensor, size: int) -> Tensor:
    """Positions from the centre to cell coordinates in [0, size - 1]."""
    return clamped(positions + size // 2, 0, size - 1)


def _bilinear(weight: Tensor, positions: Tensor, _sigma: Tensor | None, size: Sequence[int]) -> Tensor:
    """weight (*C, E), positions (A, *C, E) -> (*C, *size), by whichever form fits."""
    if needs_plain_operations(weight) or needs_plain_operations(positions):
        return bilinear_of_plain_operations(weight, positions, size)
    return bilinear_kernel(weight, positions, size)


def bilinear_of_plain_operations(weight: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """Algorithm 1 of the paper, each corner of all elements in one addition: elements x 2^A, not elements x window.

    For compilers, which make their own kernels of it, and as what `bilinear_kernel` is tested against.

    weight (*C, E), positions (A, *C, E) -> (*C, *size).
    """
    corners = [_corners(_cells(positions[axis], length), length) for axis, length in enumerate(size)]
    flat = weight.new_zeros(*weight.shape[:-1], math.prod(size))  # (*C, cells of the window)
    for choice in itertools.product(*corners):
        index, share = torch.zeros_like(weight, dtype=torch.long), weight
        for length, (cell, part) in zip(size, choice, strict=True):
            index, share = index * length + cell, share * part
        flat = flat.scatter_add_(-1, index, share)
    return flat.reshape(*weight.shape[:-1], *size)


def _corners(cells: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """The cells below and above each coordinate, and the part of the weight that each gets.

    The lower one is at most size - 2: at the upper border the part of the upper cell is 1, and the derivative points
    inward.
    """
    # Not a number stays one in the parts, but must not become an index.
    lower = cells.detach().floor().clamp(0, max(size - 2, 0)).nan_to_num(0.0)
    fraction = cells - lower
    index = lower.long()
    if size == 1:
        return [(index, 1 + 0 * fraction)]
    return [(index, 1 - fraction), (index + 1, fraction)]


def _triangle_profile(cells: Tensor, sigma: Tensor, size: int) -> Tensor:
    """relu(sigma - |u - cell|) for all u of the window: (*C, E) -> (*C, E, size).

    The derivatives at its kinks are chosen and not left to relu and abs, which give zero there, and with it elements
    that never leave the grid.
    """
    centre, spread = cells.unsqueeze(-1), sigma.unsqueeze(-1)  # (*C, E, 1)
    fixed_centre, fixed_spread = centre.detach(), spread.detach()
    offset = torch.arange(size, device=cells.device, dtype=cells.dtype) - fixed_centre  # (*C, E, size)
    distance = offset.abs()
    rightward = ((offset > 0) & (distance <= fixed_spread)).to(offset.dtype)
    rightward = rightward - ((offset <= 0) & (distance < fixed_spread)).to(offset.dtype)
    leftward = ((offset >= 0) & (distance < fixed_spread)).to(offset.dtype)
    leftward = leftward - ((offset < 0) & (distance <= fixed_spread)).to(offset.dtype)
    slope = torch.where(fixed_centre >= size - 1, leftward, rightward)
    widening = (distance <= fixed_spread).to(offset.dtype)
    value = (fixed_spread - distance).relu()
    return value + slope * (centre - fixed_centre) + widening * (spread - fixed_spread)


def _gaussian_profile(cells: Tensor, sigma: Tensor, size: int) -> Tensor:
    """exp(-((u - cell) / sigma)^2 / 2) for all u of the window: (*C, E) -> (*C, E, size)."""
    grid = torch.arange(size, device=cells.device, dtype=cells.dtype)
    return (-0.5 * ((grid - cells.unsqueeze(-1)) / sigma.unsqueeze(-1)) ** 2).exp()


def _by_profiles(
    profile: Callable[[Tensor, Tensor, int], Tensor],
    min_sigma: float,
    weight: Tensor,
    positions: Tensor,
    sigma: Tensor | None,
    size: Sequence[int],
) -> Tensor:
    """Construction from one profile an axis: weight (*C, E), positions and sigma (A, *C, E) -> (*C, *size)."""
    assert sigma is not None
    profiles = [
        profile(_cells(positions[axis], length), clamped(sigma[axis], min_sigma, math.inf), length)
        for axis, length in enumerate(size)
    ]
    return _separable(weight, profiles)


def _separable(weight: Tensor, profiles: Sequence[Tensor]) -> Tensor:
    """Sum over elements of weight times the outer product of the normalised profiles of all axes.

    weight (*C, E), profiles (*C, E, length) each -> (*C, *lengths). A matrix product per kernel, so that no tensor of
    elements x window is made in 1-D and 2-D.
    """
    first, *rest = [profile / profile.sum(-1, keepdim=True) for profile in profiles]
    spread = weight.unsqueeze(-1) * first  # (*C, E, length)
    if not rest:
        return spread.sum(-2)
    for profile in rest[:-1]:
        spread = (spread.unsqueeze(-1) * profile.unsqueeze(-2)).flatten(-2)  # (*C, E, product of lengths)
    kernel = spread.transpose(-1, -2) @ rest[-1]
    return kernel.reshape(*weight.shape[:-1], *[profile.shape[-1] for profile in profiles])


INTERPOLATIONS: dict[str, Interpolation] = {
    "bilinear": Interpolation(construct=_bilinear, exact_on_cells=True),
    "triangle": Interpolation(
        construct=functools.partial(_by_profiles, _triangle_profile, MIN_TRIANGLE_SIGMA),
        profile=_triangle_profile,
        min_sigma=MIN_TRIANGLE_SIGMA,
        initial_sigma=INITIAL_TRIANGLE_SIGMA,
        exact_on_cells=True,
    ),
    "gaussian": Interpolation(
        construct=functools.partial(_by_profiles, _gaussian_profile, MIN_GAUSSIAN_SIGMA),
        profile=_gaussian_profile,
        min_sigma=MIN_GAUSSIAN_SIGMA,
        initial_sigma=INITIAL_GAUSSIAN_SIGMA,
    ),
}
