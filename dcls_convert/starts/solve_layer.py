"""Solve regularised least squares for the weights of elements at given positions.

For an output channel, let k be its kernel (its lines in a row), k0 the old kernel, x a patch and y
the target output there. The kernel is made of elements with weights w: k = F'w, where a row of the
footprint F says how one element spreads over the cells of its line. The weights minimise

    Var(k'x - y)                     over the samples
    + (k - k0)' diag(p) (k - k0)     p: prior precision of the kernel
    + b ((k - k0)' m)^2              m: mean patch            (depthwise layers alone)
    + c (k - k0)' C (k - k0)         C: shared correlation    (depthwise layers alone)
    + d |w - w0|^2                   w0: weights to start from

In p, v and u, all cells of a line have the same value:

    p = a v + s (v + u)
    v: mean of Var(x) over the cells of the line, at least `min_input_variance` of the mean over
       all lines of the layer
    u: mean of m^2 over the cells of the line
    s: (`samples_of_old_kernel` * R * S / samples)^2

The factors come from `CalibrationSettings`, which states their sources:

    a: `kernel_prior`
    b: `mean_patch_weight` * samples of an image
    c: `shared_correlation`
    d: `ridge` * mean diagonal of the line's normal equations F M F', where M is the sum of Cov(x)
       and the matrices of the terms with k - k0

C is the mean over channels of the covariances, each divided by its v, times the channel's own v.
The mean of the outputs is not part of the objective: the bias sets it afterwards.

GPTQ (arXiv:2210.17323) and Optimal Brain Surgeon minimise the first term; the other terms are
priors for few images.

Axes are those of `second_moments.py`, and E elements, A learnt axes, N = G * Q * R lines.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .calibration_settings import CalibrationSettings
from .second_moments import Covariances, SecondMoments

# Bounds that keep divisors above zero.
MIN_RIDGE = 1e-30  # for lines whose normal equations are zero
MIN_SQUARED_RESIDUAL = 1e-300  # in the preconditioner's norm, for channels that have converged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solution:
    """The best weights and bias of one layer, and the error that remains."""

    weights: Tensor  # (N, E)
    bias: Tensor  # (O,)
    output_error: float  # |new - target| / |target| over the samples, with this bias
    keeps_fit: bool  # True if weights and bias stay as they were, since samples are too few


def solve_layer(
    moments: SecondMoments,
    box_positions: Tensor,
    old_kernel: Tensor,
    start: Tensor,
    *,
    fixed_weights: bool = False,
) -> Solution:
    """Solve for the weights and the bias that bring a layer's outputs close to the targets.

    If there are too few samples, both stay as they are.

    Args:
        moments: Joint moments, with target outputs.
        box_positions: (N, E, A) of the elements.
        old_kernel: (N, S).
        start: (N, E), weights to start from.
        fixed_weights: If True, keep the weights of `start`, and choose the bias alone.
    """
    keeps_fit = moments.has_too_few_samples
    covariances = moments.covariances()
    footprint = moments.box.footprint(box_positions.double())  # (N, E, S)
    weights = start.double()
    if not keeps_fit and not fixed_weights:
        old_kernel = old_kernel.double().reshape(covariances.cross.shape)  # (G, Q, R * S)
        weights = _solve_weights(moments, covariances, footprint, old_kernel, weights)
    kernel = (weights.unsqueeze(1) @ footprint).reshape(covariances.cross.shape)
    best_bias = _best_bias(covariances, kernel)  # (G, Q)
    bias = best_bias
    if keeps_fit:
        bias = torch.zeros_like(best_bias)
        if moments.layer.bias is not None:
            bias += moments.layer.bias.detach().reshape(bias.shape)
    return Solution(
        weights=weights,
        bias=bias.flatten(),
        output_error=_output_error(covariances, kernel, missing_mean=best_bias - bias),
        keeps_fit=keeps_fit,
    )


def _solve_weights(
    moments: SecondMoments,
    covariances: Covariances,
    footprint: Tensor,
    old_kernel: Tensor,
    start: Tensor,
) -> Tensor:
    """Return the weights (N, E) that minimise the objective; `old_kernel` is (G, Q, R * S)."""
    settings = moments.settings
    prior_precision = covariances.prior_precision
    matrix = covariances.covariance
    linear_term = covariances.cross + old_kernel * prior_precision.unsqueeze(1)  # (G, Q, R * S)
    if moments.has_one_line_per_output:
        samples_per_image = moments.sample_count / moments.image_count
        b = settings.mean_patch_weight * samples_per_image
        prior = _depthwise_prior(covariances, settings, b)
        linear_term = linear_term + old_kernel @ prior
        matrix = matrix + prior
    with _added_to_diagonal(matrix, prior_precision):
        return _minimise(matrix, footprint, linear_term, start, settings)


@contextlib.contextmanager
def _added_to_diagonal(matrix: Tensor, values: Tensor) -> Iterator[None]:
    """Add values (G, N) to the diagonal of a matrix (G, N, N) for a while.

    The matrix may be the covariance itself, of which a copy would be large for dense layers.
    """
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    before = diagonal.clone()
    diagonal.add_(values)
    try:
        yield
    finally:
        diagonal.copy_(before)


def _depthwise_prior(covariances: Covariances, settings: CalibrationSettings, b: float) -> Tensor:
    """Return b m m' + c C of the objective: (G, S, S)."""
    input_variance = covariances.input_variance.unsqueeze(2)
    mean_patch = covariances.mean_patch
    shared = (covariances.covariance / input_variance).mean(0)
    prior = settings.shared_correlation * shared * input_variance
    return prior.baddbmm_(mean_patch.unsqueeze(2), mean_patch.unsqueeze(1), alpha=b)


def _best_bias(covariances: Covariances, kernel: Tensor) -> Tensor:
    """Return the bias (G, Q) that gives outputs of a kernel (G, Q, R * S) the target means."""
    mean_output = (kernel @ covariances.mean_patch.unsqueeze(2)).squeeze(2)
    return covariances.mean_target - mean_output


def _output_error(covariances: Covariances, kernel: Tensor, *, missing_mean: Tensor) -> float:
    """Return |new - y| / |y| over all output channels; their means lack `missing_mean` (G, Q)."""
    output_variance = ((kernel @ covariances.covariance) * kernel).sum()
    covariance_with_target = (kernel * covariances.cross).sum()
    target_variance = covariances.target_variance.sum()
    error_variance = output_variance - 2 * covariance_with_target + target_variance
    error_energy = error_variance.clamp(min=0) + missing_mean.square().sum()
    target_energy = (covariances.target_variance + covariances.mean_target.square()).sum()
    if target_energy <= 0:
        return 0.0
    return float((error_energy / target_energy).sqrt())


def _minimise(
    matrix: Tensor,
    footprint: Tensor,
    linear_term: Tensor,
    start: Tensor,
    settings: CalibrationSettings,
) -> Tensor:
    """Return the weights (N, E) whose kernels k minimise k' matrix k - 2 k' linear_term + ridge.

    The preconditioner solves each line exactly, by Cholesky, with the other lines held fixed. If an
    output channel has one line, the first step is the solution, and a second step removes what
    rounding left. If elements nearly coincide, the data determine only the sum of their weights;
    the ridge keeps their differences at the starting values.
    """
    lines, _, cells = footprint.shape
    normal = _normal_equations(matrix, footprint)  # (N, E, E)
    ridge = settings.ridge * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (N, 1)
    factor = torch.linalg.cholesky(normal + torch.diag_embed(ridge.expand(start.shape) + MIN_RIDGE))
    if matrix.shape[1] > cells:  # an output channel sums several lines
        # Products with the matrix take most of the time, and steps need no more digits.
        matrix = matrix.float()
    system = _LinesSystem(matrix=matrix, footprint=footprint, ridge=ridge, factor=factor)
    right_side = (footprint @ linear_term.reshape(lines, cells, 1)).squeeze(2) + ridge * start
    max_steps = 2 if system.lines_of_channel == 1 else settings.max_steps
    return _conjugate_gradients(
        system, right_side, start, max_steps=max_steps, min_residual=settings.min_residual
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LinesSystem:
    """The linear system (F M F' + ridge) w = b for the weights of all lines."""

    matrix: Tensor  # M: (G, R * S, R * S); products with it are in its dtype
    footprint: Tensor  # F: (N, E, S)
    ridge: Tensor  # (N, 1)
    factor: Tensor  # (N, E, E): Cholesky factor of each line's own part of the system

    @property
    def lines_of_channel(self) -> int:
        """The number of lines that an output channel sums: R."""
        return self.matrix.shape[1] // self.footprint.shape[2]

    def apply(self, weights: Tensor) -> Tensor:
        """Return the left side of the system for weights (N, E)."""
        lines, _, cells = self.footprint.shape
        groups, length, _ = self.matrix.shape
        kernel = (weights.unsqueeze(1) @ self.footprint).reshape(groups, -1, length)
        product = (kernel.to(self.matrix) @ self.matrix).to(kernel)
        return (self.footprint @ product.reshape(lines, cells, 1)).squeeze(2) + self.ridge * weights

    def precondition(self, residual: Tensor) -> Tensor:
        """Multiply a residual (N, E) by the inverse of each line's own part of the system."""
        return torch.cholesky_solve(residual.unsqueeze(2), self.factor).squeeze(2)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the dot product over an output channel, repeated for each of its lines: (N, 1)."""
        dots = (a * b).reshape(-1, self.lines_of_channel * a.shape[1]).sum(1)
        return dots.repeat_interleave(self.lines_of_channel).unsqueeze(1)


def _conjugate_gradients(
    system: _LinesSystem, right_side: Tensor, start: Tensor, *, max_steps: int, min_residual: float
) -> Tensor:
    """Solve the system by conjugate gradients, in the notation of Shewchuk (1994), B3.

    All output channels take steps together, until every residual is at most `min_residual` of the
    first one, or `max_steps` are done.
    """
    x = start
    r = right_side - system.apply(x)
    d = z = system.precondition(r)
    rz = rz_first = system.dot(r, z)
    for _ in range(max_steps):
        if bool((rz <= rz_first * min_residual**2).all()):
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


def _normal_equations(matrix: Tensor, footprint: Tensor) -> Tensor:
    """Return F M F' of each line alone: (N, E, E)."""
    groups, length, _ = matrix.shape
    cells = footprint.shape[2]
    inputs = length // cells  # R
    blocks = matrix.reshape(groups, inputs, cells, inputs, cells).diagonal(dim1=1, dim2=3)
    blocks = blocks.movedim(-1, 1).unsqueeze(1)  # (G, 1, R, S, S)
    by_channel = footprint.reshape(groups, -1, inputs, *footprint.shape[1:])
    return (by_channel @ blocks @ by_channel.mT).flatten(0, 2)
