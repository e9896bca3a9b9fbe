"""The interpolations: how an element spreads over the cells around its position. All that one needs is in its record.

Axes: *C kernels, E kernel elements, A learnt axes. A spread is a product of one profile an axis, each normalised to sum
1 inside the window. `cells` are positions counted from the first cell of the window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..depthwise.eager import on_cpu
from .bilinear import bilinear_kernel, clamped

Profile = Callable[
    [Tensor, Tensor, int], Tensor
]  # cells and sigma (*C, E), length -> (*C, E, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolation:
    """One way to spread an element along an axis of the window."""

    profile: (
        Profile  # how much of the element each cell gets, before it is normalised; differentiable
    )
    slope: Profile  # the derivative of the profile by the position
    min_sigma: float | None = None  # cells; None: no sigma (its functions are then given one of 1)
    initial_sigma: float | None = None  # cells
    exact_on_cells: bool = (
        False  # whether an element in the middle of a cell starts in that cell alone
    )
    construct: Callable[[Tensor, Tensor, Sequence[int]], Tensor] | None = (
        None  # a faster way, for one without sigma
    )
    hat: bool = False  # whether the profile with the initial sigma is the triangle of half-width 1

    @property
    def has_sigma(self) -> bool:
        return self.min_sigma is not None

    def kernel(
        self, weight: Tensor, positions: Tensor, sigma: Tensor | None, size: Sequence[int]
    ) -> Tensor:
        """weight (*C, E), positions and sigma (A, *C, E) in cells from the centre -> (*C, *size)."""
        if self.construct is not None:
            return self.construct(weight, positions, size)
        profiles = []
        for axis, length in enumerate(size):
            cells = clamped(positions[axis] + length // 2, 0, length - 1)
            width = (
                torch.ones_like(cells)
                if sigma is None
                else clamped(sigma[axis], self.min_sigma or 0, math.inf)
            )
            profile = self.profile(cells, width, length)
            profiles.append(profile / profile.sum(-1, keepdim=True))
        spread = weight.unsqueeze(-1)  # (*C, E, 1)
        for profile in profiles[:-1]:
            spread = (spread.unsqueeze(-1) * profile.unsqueeze(-2)).flatten(
                -2
            )  # (*C, E, product of lengths)
        # On a CPU, a matrix product per kernel: no tensor of elements x window is made in 1-D and 2-D. A GPU might
        # round its factors to 11 bits (TF32).
        if on_cpu(weight):
            kernel = spread.transpose(-1, -2) @ profiles[-1]
        else:
            kernel = (spread.unsqueeze(-1) * profiles[-1].unsqueeze(-2)).sum(-3)
        return kernel.reshape(*weight.shape[:-1], *size)

    def footprint(self, cells: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The normalised profile with the initial sigma and its slope: cells (*C, E) -> (*C, E, length) each."""
        if self.hat:
            return _hat(cells, length)
        sigma = torch.full_like(cells, self.initial_sigma or 1.0)
        value, slope = self.profile(cells, sigma, length), self.slope(cells, sigma, length)
        total = value.sum(-1, keepdim=True)
        value = value / total
        return value, (slope - value * slope.sum(-1, keepdim=True)) / total


def find_interpolation(name: str) -> Interpolation:
    """The interpolation of that name; ValueError names those there are."""
    if name not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation={name!r} is not known; it is one of {', '.join(INTERPOLATIONS)}"
        )
    return INTERPOLATIONS[name]


def position_limits(size: int) -> tuple[int, int]:
    """The first and last cell of a window of `size` cells, counted from its centre: (-8, 8) for 17, (-4, 3) for 8."""
    return -(size // 2), (size - 1) // 2


def learnt_axes(dims: int, dense_axes: Sequence[int] = ()) -> tuple[int, ...]:
    """The spatial axes along which elements have a position, in the order of `positions[0], positions[1], ...`."""
    return tuple(axis for axis in range(dims) if axis not in dense_axes)


def _grid(cells: Tensor, length: int) -> Tensor:
    return torch.arange(length, device=cells.device, dtype=cells.dtype)


def _triangle(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """relu(sigma - |u - cell|) for all u of the window. At kinks, by the next cell; at the upper border, inward."""
    fixed_sigma = sigma.detach().unsqueeze(-1)  # (*C, E, 1)
    distance = (_grid(cells, length) - cells.detach().unsqueeze(-1)).abs()  # (*C, E, length)
    value = (fixed_sigma - distance).relu()
    widening = (distance <= fixed_sigma).to(value.dtype)
    moved = (cells - cells.detach()).unsqueeze(-1)  # zero, with the gradient of the position
    return (
        value
        + _triangle_slope(cells, sigma, length) * moved
        + widening * (sigma.unsqueeze(-1) - fixed_sigma)
    )


def _triangle_slope(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    centre, spread = cells.detach().unsqueeze(-1), sigma.detach().unsqueeze(-1)
    offset = _grid(cells, length) - centre  # (*C, E, length)
    inside, reached = offset.abs() < spread, offset.abs() <= spread
    rightward = ((offset > 0) & reached).to(offset.dtype) - ((offset <= 0) & inside).to(
        offset.dtype
    )
    leftward = ((offset >= 0) & inside).to(offset.dtype) - ((offset < 0) & reached).to(offset.dtype)
    return torch.where(centre >= length - 1, leftward, rightward)


def _hat(cells: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The triangle of half-width 1 and its slope, as `_triangle_slope` chooses it. In memory, `length` comes first."""
    grid = _grid(cells, length).reshape(-1, *[1] * cells.dim())  # (length, 1, ...)
    value = (1 - (grid - cells).abs()).relu()  # its sum is 1
    beyond = grid - cells.floor().clamp(max=max(length - 2, 0))
    slope = (beyond == 1).to(cells.dtype) - (beyond == 0).to(cells.dtype) * (length > 1)
    return value.movedim(0, -1), slope.movedim(0, -1)


def _gaussian(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """exp(-((u - cell) / sigma)^2 / 2) for all u of the window."""
    return (-0.5 * ((_grid(cells, length) - cells.unsqueeze(-1)) / sigma.unsqueeze(-1)) ** 2).exp()


def _gaussian_slope(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    offset = _grid(cells, length) - cells.unsqueeze(-1)
    return _gaussian(cells, sigma, length) * offset / sigma.unsqueeze(-1) ** 2


INTERPOLATIONS: dict[str, Interpolation] = {  # sigmas as in DCLS 0.1.1
    "bilinear": Interpolation(
        profile=_triangle,
        slope=_triangle_slope,
        hat=True,
        exact_on_cells=True,
        construct=bilinear_kernel,
    ),
    "triangle": Interpolation(
        profile=_triangle,
        slope=_triangle_slope,
        hat=True,
        exact_on_cells=True,
        min_sigma=1.0,
        initial_sigma=1.0,
    ),
    # Below its least value, an element between cells loses its gradient. It starts from 0.23 + 0.27.
    "gaussian": Interpolation(
        profile=_gaussian, slope=_gaussian_slope, min_sigma=0.27, initial_sigma=0.5
    ),
}
