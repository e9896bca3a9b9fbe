"""Solve least squares for the weights of elements at given positions.

For an output channel, let k be the new kernel (its lines in a row) and k0 the old kernel. The new
kernel is made of elements with weights w: k = F'w, where a row of the footprint F says how one
element spreads over the cells of its line. The weights minimise

    (k - k0)' M (k - k0) + d |w - w0|^2

with the costs M of errors (`InputMoments.costs`), and initial weights w0. d is a small share
of the mean diagonal of the line's part of F M F'. If elements nearly coincide, only the sum of
their weights counts; d keeps their differences.

Optimal Brain Surgeon and GPTQ (arXiv:2210.17323) minimise (k - k0)' E[xx'] (k - k0), too.

Axes: G groups of the convolution, Q output channels of each, R lines of a channel, N = G * Q * R
lines, S cells of the box, E elements.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-4  # d, as a share of the mean diagonal of a line's part of F M F'
MAX_STEPS = 5  # more steps fit the noise of few images
MIN_RESIDUAL = 1e-4  # share of the first residual, in the norm of the preconditioner
# Bounds that keep divisors above zero.
MIN_RIDGE = 1e-30  # for lines whose normal equations are zero
MIN_SQUARED_RESIDUAL = 1e-300  # for channels that have converged


def solve_weights(costs: Tensor, footprint: Tensor, old: Tensor, start: Tensor) -> Tensor:
    """Return the weights (N, E) that minimise the objective, by conjugate gradients.

    The preconditioner solves each line exactly, with the other lines held fixed. If a channel has
    one line, the first step is the solution, and a second one removes what rounding left. The
    notation is from Shewchuk (1994), B3.

    Args:
        costs: M (G, R * S, R * S).
        footprint: F (N, E, S).
        old: Lines of the old kernel (N, S).
        start: w0 (N, E).
    """
    system = _make_system(costs, footprint)
    x = start
    r = system.gradient(old - system.kernel(start))
    d = z = system.precondition(r)
    rz = rz_first = system.dot(r, z)
    for _ in range(2 if system.lines_of_channel == 1 else MAX_STEPS):
        if bool((rz <= rz_first * MIN_RESIDUAL**2).all()):
            break
        q = system.apply(d)
        dq = system.dot(d, q)
        alpha = torch.where(dq > 0, rz / dq, 0.0)
        x = x + alpha * d
        r = r - alpha * q
        z = system.precondition(r)
        rz_before = rz.clamp(min=MIN_SQUARED_RESIDUAL)
        rz = system.dot(r, z)
        d = z + rz / rz_before * d
    return x


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _System:
    """The linear system (F M F' + ridge) w = F M k0 + ridge w0 for the weights of all lines."""

    costs: Tensor  # M: (G, R * S, R * S); products with it are in its dtype
    footprint: Tensor  # F: (N, E, S)
    ridge: Tensor  # (N, 1)
    factor: Tensor  # (N, E, E): Cholesky factor of each line's own part of the system

    @property
    def lines_of_channel(self) -> int:
        """The number of lines that an output channel sums: R."""
        return self.costs.shape[1] // self.footprint.shape[2]

    def kernel(self, weights: Tensor) -> Tensor:
        """Return F'w for weights (N, E): (N, S)."""
        return (weights.unsqueeze(1) @ self.footprint).squeeze(1)

    def gradient(self, kernel: Tensor) -> Tensor:
        """Return F M k for lines k (N, S), the gradient of k'Mk / 2 by the weights: (N, E)."""
        groups, length, _ = self.costs.shape
        by_channel = kernel.reshape(groups, -1, length)
        product = (by_channel.to(self.costs) @ self.costs).to(kernel)
        return (self.footprint @ product.reshape(*kernel.shape, 1)).squeeze(2)

    def apply(self, weights: Tensor) -> Tensor:
        """Return the left side of the system for weights (N, E)."""
        return self.gradient(self.kernel(weights)) + self.ridge * weights

    def precondition(self, residual: Tensor) -> Tensor:
        """Multiply a residual (N, E) by the inverse of each line's own part of the system."""
        return torch.cholesky_solve(residual.unsqueeze(2), self.factor).squeeze(2)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the dot product over an output channel, repeated for each of its lines: (N, 1)."""
        dots = (a * b).reshape(-1, self.lines_of_channel * a.shape[1]).sum(1)
        return dots.repeat_interleave(self.lines_of_channel).unsqueeze(1)


def _make_system(costs: Tensor, footprint: Tensor) -> _System:
    groups, length, _ = costs.shape
    elements, cells = footprint.shape[1:]
    inputs = length // cells  # R
    blocks = costs.reshape(groups, inputs, cells, inputs, cells).diagonal(dim1=1, dim2=3)
    blocks = blocks.movedim(-1, 1).unsqueeze(1)  # (G, 1, R, S, S)
    by_channel = footprint.reshape(groups, -1, inputs, elements, cells)
    own_parts = (by_channel @ blocks @ by_channel.mT).flatten(0, 2)  # (N, E, E)
    ridge = RIDGE * own_parts.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (N, 1)
    own_parts.diagonal(dim1=1, dim2=2).add_(ridge + MIN_RIDGE)
    if inputs > 1:  # products with M take most of the time, and steps need no more digits
        costs = costs.float()
    return _System(
        costs=costs,
        footprint=footprint,
        ridge=ridge,
        factor=torch.linalg.cholesky(own_parts),
    )
