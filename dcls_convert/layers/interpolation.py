"""The interpolations: how an element spreads over the cells around its position.

Each interpolation is one record. An element spreads by the product of its profiles, one along each
learnt axis. Each profile is normalised to sum to 1 inside the window.

Axes: *C kernels, E kernel elements, A learnt axes. `cells` are positions counted from the first
cell of the window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .bilinear import bilinear_kernel

# cells and sigma (*C, E), length of the window -> (*C, E, length)
Profile = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolation:
    """One way to spread an element along an axis of the window.

    A new interpolation needs `profile`, `slope` and `support`. It needs `min_sigma` and
    `initial_sigma` if elements have a learnt width. `fast_kernel` and `fast_profile_and_slope` only
    make the built-in interpolations faster.

    The slope must not vanish for elements on cells: starts from old kernels put elements there, and
    they would never move. Where the profile has a kink, the slope is the right-hand derivative. At
    the upper border of the window it is the left-hand one, which points inward.
    """

    # How much of the element each cell gets, before it is normalised; differentiable.
    profile: Profile
    slope: Profile  # the profile's derivative with respect to the position, not normalised
    # Cells at this distance from an element, and farther ones, get nothing of it (or less than
    # rounding shows) with the initial sigma.
    support: int
    # In cells. None if the interpolation has no sigma; `profile` and `slope` then get a sigma of 1.
    min_sigma: float | None = None
    initial_sigma: float | None = None  # cells
    # Optional, only if there is no sigma: a faster way to construct the kernel.
    fast_kernel: Callable[[Tensor, Tensor, Sequence[int]], Tensor] | None = None
    # Optional: a faster `normalised_profile_and_slope`.
    fast_profile_and_slope: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None

    @property
    def has_sigma(self) -> bool:
        """True if elements have a learnt width in addition to their position."""
        return self.min_sigma is not None

    @property
    def is_exact_on_cells(self) -> bool:
        """True if an element at a cell's centre lies in that cell alone, with the initial sigma."""
        centre = torch.tensor([float(self.support)])
        profile, _ = self.normalised_profile_and_slope(centre, 2 * self.support + 1)
        return int(profile.count_nonzero()) == 1

    def normalised_profile_and_slope(self, cells: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the normalised profile with the initial sigma, and its slope.

        cells (*C, E) -> (*C, E, length) each.
        """
        if self.fast_profile_and_slope is not None:
            return self.fast_profile_and_slope(cells, length)
        sigma = torch.full_like(cells, self.initial_sigma or 1.0)
        value = self.profile(cells, sigma, length)
        slope = self.slope(cells, sigma, length)
        total = value.sum(-1, keepdim=True)
        normalised = value / total
        normalised_slope = (slope - normalised * slope.sum(-1, keepdim=True)) / total
        return normalised, normalised_slope


def find_interpolation(name: str) -> Interpolation:
    """Return the interpolation of this name, or raise a ValueError that lists the known names."""
    if name not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation={name!r} is not known; it is one of {', '.join(INTERPOLATIONS)}"
        )
    return INTERPOLATIONS[name]


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
    # Both are 0, and carry the gradients of the position and of sigma.
    zero_by_position = (cells - cells.detach()).unsqueeze(-1)
    zero_by_sigma = sigma.unsqueeze(-1) - fixed_sigma
    slope = _triangle_slope(cells, sigma, length)
    return value + slope * zero_by_position + slope_by_sigma * zero_by_sigma


def _triangle_slope(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    centre = cells.detach().unsqueeze(-1)
    half_width = sigma.detach().unsqueeze(-1)
    offset = _grid(cells, length) - centre  # (*C, E, length)
    inside = offset.abs() < half_width
    reached = offset.abs() <= half_width  # `inside` and the two ends
    rising = ((offset > 0) & reached).to(offset.dtype)
    falling = ((offset <= 0) & inside).to(offset.dtype)
    right_hand = rising - falling
    rising = ((offset >= 0) & inside).to(offset.dtype)
    falling = ((offset < 0) & reached).to(offset.dtype)
    left_hand = rising - falling
    return torch.where(centre >= length - 1, left_hand, right_hand)


def _unit_triangle_and_slope(cells: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the triangle of half-width 1 and its slope: cells (*C, E) -> (*C, E, length) each.

    At kinks and borders, the slope is that of `_triangle_slope`. In memory, `length` comes first.
    """
    grid = _grid(cells, length).reshape(-1, *[1] * cells.dim())  # (length, 1, ...)
    value = (1 - (grid - cells).abs()).relu()  # sums to 1
    steps_up = grid - cells.floor().clamp(max=max(length - 2, 0))
    rising = (steps_up == 1).to(cells.dtype)
    falling = (steps_up == 0).to(cells.dtype) * (length > 1)
    slope = rising - falling
    return value.movedim(0, -1), slope.movedim(0, -1)


def _gaussian(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """Return exp(-((u - cell) / sigma)^2 / 2) for all cells u of the window."""
    offset = _grid(cells, length) - cells.unsqueeze(-1)
    return (-0.5 * (offset / sigma.unsqueeze(-1)) ** 2).exp()


def _gaussian_slope(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    offset = _grid(cells, length) - cells.unsqueeze(-1)
    return _gaussian(cells, sigma, length) * offset / sigma.unsqueeze(-1) ** 2


INTERPOLATIONS: dict[str, Interpolation] = {  # sigmas as in DCLS 0.1.1
    "bilinear": Interpolation(
        profile=_triangle,
        slope=_triangle_slope,
        fast_profile_and_slope=_unit_triangle_and_slope,
        support=1,
        fast_kernel=bilinear_kernel,
    ),
    "triangle": Interpolation(
        profile=_triangle,
        slope=_triangle_slope,
        fast_profile_and_slope=_unit_triangle_and_slope,
        support=1,
        min_sigma=1.0,
        initial_sigma=1.0,
    ),
    # With a smaller sigma, an element between two cells would lose its gradient. DCLS 0.1.1 adds
    # 0.27 to its parameter, which starts at 0.23.
    "gaussian": Interpolation(
        profile=_gaussian,
        slope=_gaussian_slope,
        support=4,  # eight times the initial sigma
        min_sigma=0.27,
        initial_sigma=0.5,
    ),
}
