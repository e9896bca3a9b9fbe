"""Regularised least squares: weights of elements at given positions that keep the outputs.

For an output channel, let k be its kernel (its lines in a row), k0 the old kernel, x a patch and y
the target output there. The kernel is made of elements with weights w: k = F'w, where a row of F,
the footprint, says how one element spreads over the cells of its line. The weights minimise

    Var(k'x - y)                     over the samples
    + (k - k0)' diag(p) (k - k0)     p: prior precision of the kernel
    + b ((k - k0)' m)^2              m: mean patch            (depthwise layers alone)
    + c (k - k0)' C (k - k0)         C: shared correlation    (depthwise layers alone)
    + d |w - w0|^2                   w0: weights to start from

where, with an entry for each line, which all its cells share,

    p = a v + s (v + u)
    v: mean of Var(x) over the cells of the line, at least `min_input_variance` of the mean over
       all lines of the layer
    u: mean of m^2 over the cells of the line
    s: (`samples_of_old_kernel` * R * S / samples)^2

and, from `CalibrationSettings`, which says where the numbers come from,

    a: `kernel_prior`
    b: `mean_patch_weight` * samples of an image
    c: `shared_correlation`
    d: `ridge` * mean diagonal of the line's normal equations F M F', where M is the sum of Cov(x)
       and the matrices of the terms with k - k0

C has v's scale: the mean over channels of the covariances, each divided by its v, times v. The mean
of the outputs is not part of the objective: the bias sets it afterwards.

It is what GPTQ (arXiv:2210.17323) and Optimal Brain Surgeon minimise, plus priors for few images.

Axes: as in `second_moments.py`, and E elements, A learnt axes, N = G * Q * R lines.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .calibration_settings import CalibrationSettings
from .second_moments import Covariances, SecondMoments

# Bounds that keep divisors above zero.
MIN_RIDGE = 1e-30  # for lines with normal equations of zero
MIN_SQUARED_RESIDUAL = 1e-300  # in the preconditioner's norm, for channels that have converged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solution:
    """The best weights and bias of one layer, and the error that remains."""

    weights: Tensor  # (N, E)
    bias: Tensor  # (O,)
    output_error: float  # |new - target| / |target| over the samples, with this bias
    keeps_fit: bool  # weights and bias are those of before, since there are too few samples


def solve_layer(
    moments: SecondMoments,
    box_positions: Tensor,
    old_kernel: Tensor,
    start: Tensor,
    *,
    fixed_weights: bool = False,
) -> Solution:
    """The weights and the bias of a layer for outputs close to the targets.

    With too few samples, both are kept as they are.

    Args:
        moments: Joint, with target outputs.
        box_positions: (N, E, A) of the elements.
        old_kernel: (N, S).
        start: (N, E), weights to start from.
        fixed_weights: Whether to keep the weights to start from, and to choose the bias alone.
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
    """The weights (N, E) that minimise the objective; `old_kernel` is (G, Q, R * S)."""
    settings = moments.settings
    prior_precision = covariances.prior_precision
    matrix = covariances.covariance
    goal = covariances.cross + old_kernel * prior_precision.unsqueeze(1)
    if moments.has_one_line_per_output:
        samples_per_image = moments.sample_count / moments.image_count
        b = settings.mean_patch_weight * samples_per_image
        prior = _depthwise_prior(covariances, settings, b)
        goal = goal + old_kernel @ prior
        matrix = matrix + prior
    # Added in place, and subtracted again: the matrix may be the covariance itself, of which a copy
    # would be large for dense layers.
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    diagonal.add_(prior_precision)
    weights = _minimise(matrix, footprint, goal, start, settings)
    diagonal.sub_(prior_precision)
    return weights


def _depthwise_prior(covariances: Covariances, settings: CalibrationSettings, b: float) -> Tensor:
    """b m m' + c C of the objective, (G, S, S)."""
    input_variance = covariances.input_variance.unsqueeze(2)
    mean_patch = covariances.mean_patch
    shared = (covariances.covariance / input_variance).mean(0)
    prior = settings.shared_correlation * shared * input_variance
    return prior.baddbmm_(mean_patch.unsqueeze(2), mean_patch.unsqueeze(1), alpha=b)


def _best_bias(covariances: Covariances, kernel: Tensor) -> Tensor:
    """The bias (G, Q) with which the outputs of a kernel (G, Q, R * S) have the target means."""
    mean_output = (kernel @ covariances.mean_patch.unsqueeze(2)).squeeze(2)
    return covariances.mean_target - mean_output


def _output_error(covariances: Covariances, kernel: Tensor, *, missing_mean: Tensor) -> float:
    """|new - y| / |y| over all output channels, whose means lack `missing_mean` (G, Q)."""
    spread = ((kernel @ covariances.covariance) * kernel).sum()
    common = (kernel * covariances.cross).sum()
    variance_left = spread - 2 * common + covariances.target_variance.sum()
    left = variance_left.clamp(min=0) + missing_mean.square().sum()
    target_energy = (covariances.target_variance + covariances.mean_target.square()).sum()
    if target_energy <= 0:
        return 0.0
    return float((left / target_energy).sqrt())


def _minimise(
    matrix: Tensor, footprint: Tensor, goal: Tensor, start: Tensor, settings: CalibrationSettings
) -> Tensor:
    """Weights (N, E) whose kernels k have the least k' matrix k - 2 k' goal, with the ridge.

    The preconditioner solves each line exactly, by Cholesky, with the other lines held fixed. Where
    an output channel has one line, the first step is the solution, and a second one takes off what
    rounding left. If elements nearly coincide, the data determine only the sum of their weights;
    the ridge keeps their differences at the starting values.
    """
    lines, _, cells = footprint.shape
    normal = _normal_equations(matrix, footprint)  # (N, E, E)
    ridge = settings.ridge * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (N, 1)
    factor = torch.linalg.cholesky(normal + torch.diag_embed(ridge.expand(start.shape) + MIN_RIDGE))
    if matrix.shape[1] > cells:  # an output channel sums several lines
        # Most of the time goes into products with the matrix; steps need no more digits.
        matrix = matrix.float()
    system = _LinesSystem(matrix=matrix, footprint=footprint, ridge=ridge, factor=factor)
    right_side = (footprint @ goal.reshape(lines, cells, 1)).squeeze(2) + ridge * start
    max_steps = 2 if system.lines_of_channel == 1 else settings.max_steps
    return _conjugate_gradients(
        system, right_side, start, max_steps=max_steps, min_residual=settings.min_residual
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LinesSystem:
    """The linear system (F M F' + ridge) w = b of the weights of all lines."""

    matrix: Tensor  # M: (G, R * S, R * S), in the dtype of products with it
    footprint: Tensor  # F: (N, E, S)
    ridge: Tensor  # (N, 1)
    factor: Tensor  # (N, E, E): Cholesky factor of each line's own part of the system

    @property
    def lines_of_channel(self) -> int:
        """Lines that an output channel sums, R."""
        return self.matrix.shape[1] // self.footprint.shape[2]

    def apply(self, weights: Tensor) -> Tensor:
        """The left side of the system for weights (N, E)."""
        lines, _, cells = self.footprint.shape
        groups, length, _ = self.matrix.shape
        kernel = (weights.unsqueeze(1) @ self.footprint).reshape(groups, -1, length)
        product = (kernel.to(self.matrix) @ self.matrix).to(kernel)
        return (self.footprint @ product.reshape(lines, cells, 1)).squeeze(2) + self.ridge * weights

    def precondition(self, residual: Tensor) -> Tensor:
        """The residual (N, E) times the inverse of each line's own part of the system."""
        return torch.cholesky_solve(residual.unsqueeze(2), self.factor).squeeze(2)

    def dot(self, one: Tensor, other: Tensor) -> Tensor:
        """The product over all elements of an output channel, for each of its lines: (N, 1)."""
        products = (one * other).reshape(-1, self.lines_of_channel * one.shape[1]).sum(1)
        return products.repeat_interleave(self.lines_of_channel).unsqueeze(1)


def _conjugate_gradients(
    system: _LinesSystem, right_side: Tensor, start: Tensor, *, max_steps: int, min_residual: float
) -> Tensor:
    """Preconditioned conjugate gradients in the letters of Shewchuk (1994), B3.

    They run for all output channels at once, until every residual is at most `min_residual` of the
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
    """F M F' of each line alone: (N, E, E)."""
    groups, length, _ = matrix.shape
    cells = footprint.shape[2]
    inputs = length // cells  # R
    blocks = matrix.reshape(groups, inputs, cells, inputs, cells).diagonal(dim1=1, dim2=3)
    blocks = blocks.movedim(-1, 1).unsqueeze(1)  # (G, 1, R, S, S)
    by_channel = footprint.reshape(groups, -1, inputs, *footprint.shape[1:])
    return (by_channel @ blocks @ by_channel.mT).flatten(0, 2)
