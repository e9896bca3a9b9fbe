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

    A new interpolation needs `profile` and `support`. It needs `min_sigma` and `initial_sigma` if
    elements have a learnt width. `fast_kernel` only makes the built-in ones faster.

    The profile's derivative by the position must not vanish for elements on cells: starts from old
    kernels put elements there, and they would never move. Where the profile has a kink, it is the
    right-hand derivative. At the upper border of the window it is the left-hand one, which points
    inward.
    """

    # How much of the element each cell gets, before it is normalised; differentiable.
    profile: Profile
    # Cells at this distance from an element, and farther ones, get nothing of it (or less than
    # rounding shows) with the initial sigma.
    support: int
    # In cells. None if the interpolation has no sigma; `profile` then gets a sigma of 1.
    min_sigma: float | None = None
    initial_sigma: float | None = None  # cells
    # Optional, only if there is no sigma: a faster way to construct the kernel. It is used except
    # in exports, for windows whose sides are longer than one cell.
    fast_kernel: Callable[[Tensor, Tensor, Sequence[int]], Tensor] | None = None

    @property
    def has_sigma(self) -> bool:
        """True if elements have a learnt width in addition to their position."""
        return self.min_sigma is not None

    @property
    def is_exact_on_cells(self) -> bool:
        """True if an element at a cell's centre lies in that cell alone, with the initial sigma."""
        centre = torch.tensor([float(self.support)])
        profile = self.normalised_profile(centre, 2 * self.support + 1)
        return int(profile.count_nonzero()) == 1

    def normalised_profile(self, cells: Tensor, length: int, sigma: Tensor | None = None) -> Tensor:
        """Return the normalised profile: (*C, E) -> (*C, E, length). Default: the initial sigma."""
        if sigma is None:
            sigma = torch.full_like(cells, self.initial_sigma or 1.0)
        value = self.profile(cells, sigma, length)
        return value / value.sum(-1, keepdim=True)


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
    width = sigma.detach().unsqueeze(-1)
    offset = _grid(cells, length) - centre  # (*C, E, length)

    def one_where(first: Tensor, second: Tensor) -> Tensor:
        # Not `&`, which coremltools does not support.
        return torch.logical_and(first, second).to(offset.dtype)

    right_hand = one_where(offset > 0, offset <= width) - one_where(offset > -width, offset <= 0)
    left_hand = one_where(offset >= 0, offset < width) - one_where(offset >= -width, offset < 0)
    return torch.where(centre >= length - 1, left_hand, right_hand)


def _gaussian(cells: Tensor, sigma: Tensor, length: int) -> Tensor:
    """Return exp(-((u - cell) / sigma)^2 / 2) for all cells u of the window."""
    offset = _grid(cells, length) - cells.unsqueeze(-1)
    return (-0.5 * (offset / sigma.unsqueeze(-1)) ** 2).exp()


INTERPOLATIONS: dict[str, Interpolation] = {  # sigmas as in DCLS 0.1.1
    "bilinear": Interpolation(
        profile=_triangle,
        support=1,
        fast_kernel=bilinear_kernel,
    ),
    "triangle": Interpolation(
        profile=_triangle,
        support=1,
        min_sigma=1.0,
        initial_sigma=1.0,
    ),
    # With a smaller sigma, an element between two cells would lose its gradient. DCLS 0.1.1 adds
    # 0.27 to its parameter, which starts at 0.23.
    "gaussian": Interpolation(
        profile=_gaussian,
        support=4,  # eight times the initial sigma
        min_sigma=0.27,
        initial_sigma=0.5,
    ),
}
