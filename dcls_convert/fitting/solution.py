"""Regularised least squares: weights of elements at given positions that keep the outputs.

For an output channel, let k be its kernel (its lines in a row), k0 the old kernel, x a patch and y
the output that is wanted there. The kernel is made of elements with weights w: k = F'w, where a row
of F, the footprint, says how one element spreads over the cells of its line. The weights minimise

    Var(k'x - y)                     over the sampled places
    + a (k - k0)' diag(v) (k - k0)   v: mean variance of each line's input
    + b ((k - k0)' m)^2              m: mean patch            (depthwise layers alone)
    + c (k - k0)' P (k - k0)         P: shared correlation    (depthwise layers alone)
    + d |w - w0|^2                   w0: weights to start from

a grows where places are few; what it grows by weighs squared means as well as v, see
`SecondMoments._damping`. b is `mean_patch_weight` times the sampled places of an image.

P has v's scale: the mean over channels of the covariances, each divided by its v, times v. The mean
of the outputs is not part of it: the mean shift sets it afterwards. The numbers a to d, and where
they come from, are in `CalibrationSettings`: `damping`, `mean_patch_weight`, `shared_correlation`,
`ridge` (times the mean diagonal of the normal equations).

It is what GPTQ (arXiv:2210.17323) and Optimal Brain Surgeon minimise, plus priors for few images.

Axes: as in `second_moments.py`, and E elements, A learnt axes, N = G * Q * R lines.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .calibration_settings import CalibrationSettings
from .second_moments import SecondMoments, Statistics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solution:
    """The best weights of one layer, and what is left."""

    weights: Tensor  # (N, E)
    # (O,): to add to the outputs without bias, so that each channel has the wanted mean. Of too few
    # places, the bias that the layer has.
    mean_shift: Tensor
    output_error: float  # |new - wanted| / |wanted| over the sampled places, with the mean shift


def solve_weights(
    moments: SecondMoments,
    places: Tensor,
    old: Tensor,
    start: Tensor,
    *,
    fixed: bool = False,
) -> Solution:
    """The weights of elements for outputs close to the wanted ones.

    Args:
        moments: Joint, with wanted outputs.
        places: (N, E, A) of the elements, in cells from the first cell of the box.
        old: (N, S), the old kernel.
        start: (N, E), weights to go on from; kept as they are if `fixed`, or of too few places.
    """
    settings = moments.settings
    statistics = moments.statistics()
    footprint = moments.box.footprint(places.double())  # (N, E, S)
    old = old.double().reshape(statistics.cross.shape)  # (G, Q, R * S)
    start = start.double()
    damping = statistics.damping
    matrix = statistics.covariance
    goal = statistics.cross + old * damping.unsqueeze(1)
    one_line_a_channel = moments.length == footprint.shape[2]
    if one_line_a_channel:
        places_of_image = moments.places / moments.images
        b = settings.mean_patch_weight * places_of_image
        prior = _depthwise_prior(statistics, settings, b)
        goal = goal + old @ prior
        matrix = matrix + prior
    # Added in place, and taken off again: the matrix may be the covariance itself, of which a copy
    # would be large for dense layers.
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    diagonal.add_(damping)
    weights = start
    if not fixed and not moments.too_few_places:
        weights = _minimise(matrix, footprint, goal, start, settings)
    diagonal.sub_(damping)
    kernel = (weights.unsqueeze(1) @ footprint).reshape(statistics.cross.shape)
    mean_output = (kernel @ statistics.mean_patch.unsqueeze(2)).squeeze(2)  # (G, Q)
    missing_mean = statistics.mean_target - mean_output
    mean_shift = missing_mean
    if moments.too_few_places:
        mean_shift = torch.zeros_like(missing_mean)
        if moments.layer.bias is not None:
            mean_shift += moments.layer.bias.detach().reshape(mean_shift.shape)
    return Solution(
        weights=weights,
        mean_shift=mean_shift.flatten(),
        output_error=_output_error(kernel, statistics, missing_mean - mean_shift),
    )


def _depthwise_prior(statistics: Statistics, settings: CalibrationSettings, b: float) -> Tensor:
    """b m m' + c P of the objective, (G, S, S)."""
    energy = statistics.energy.unsqueeze(2)
    mean_patch = statistics.mean_patch
    shared = (statistics.covariance / energy).mean(0)
    prior = settings.shared_correlation * shared * energy
    return prior.baddbmm_(mean_patch.unsqueeze(2), mean_patch.unsqueeze(1), alpha=b)


def _output_error(kernel: Tensor, statistics: Statistics, missing_mean: Tensor) -> float:
    """|new - y| / |y| over all output channels, whose means lack `missing_mean` (G, Q)."""
    spread = ((kernel @ statistics.covariance) * kernel).sum()
    common = (kernel * statistics.cross).sum()
    variance_left = spread - 2 * common + statistics.target_variance.sum()
    left = variance_left.clamp(min=0) + missing_mean.square().sum()
    wanted = (statistics.target_variance + statistics.mean_target.square()).sum()
    if wanted <= 0:
        return 0.0
    return float((left / wanted).sqrt())


def _minimise(
    matrix: Tensor, footprint: Tensor, goal: Tensor, start: Tensor, settings: CalibrationSettings
) -> Tensor:
    """Weights (N, E) whose kernels k have the least k' matrix k - 2 k' goal, with the ridge.

    Preconditioned conjugate gradients in the letters of Shewchuk (1994), B3, for all output
    channels at once. The preconditioner solves each line exactly, by Cholesky, with the other lines
    held fixed. Where an output channel has one line, the first step is the solution, and a second
    one takes off what rounding left. If elements nearly coincide, only the sum of their weights
    counts, which the ridge keeps as it starts.
    """
    groups, length, _ = matrix.shape
    lines, _, cells = footprint.shape
    lines_of_channel = length // cells  # R
    normal = _normal_equations(matrix, footprint)  # (N, E, E)
    ridge = settings.ridge * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)  # (N, 1)
    factor = torch.linalg.cholesky(normal + torch.diag_embed(ridge.expand(start.shape) + 1e-30))
    # Most of the time goes into products with the matrix; steps need no more digits than float32.
    multiplier = matrix
    if lines_of_channel > 1:
        multiplier = matrix.float()

    def apply(weights: Tensor) -> Tensor:
        """F M F' w + ridge w."""
        kernel = (weights.unsqueeze(1) @ footprint).reshape(groups, -1, length)
        product = (kernel.to(multiplier) @ multiplier).to(kernel)
        return (footprint @ product.reshape(lines, cells, 1)).squeeze(2) + ridge * weights

    def precondition(residual: Tensor) -> Tensor:
        return torch.cholesky_solve(residual.unsqueeze(2), factor).squeeze(2)

    def dot(one: Tensor, other: Tensor) -> Tensor:
        """Over all elements of an output channel; given to each of its lines: (N, 1)."""
        products = (one * other).reshape(-1, lines_of_channel * one.shape[1]).sum(1)
        return products.repeat_interleave(lines_of_channel).unsqueeze(1)

    x = start
    r = (footprint @ goal.reshape(lines, cells, 1)).squeeze(2) + ridge * start - apply(start)
    d = torch.zeros_like(r)
    rz_before = torch.ones_like(ridge)
    rz_first: Tensor | None = None
    steps = settings.max_steps if lines_of_channel > 1 else 2
    for step in range(steps):
        z = precondition(r)
        rz = dot(r, z)
        if rz_first is None:
            rz_first = rz
        if bool((rz <= rz_first * settings.min_residual**2).all()):
            break
        beta = rz / rz_before if step > 0 else 0.0
        d = z + beta * d
        q = apply(d)
        dq = dot(d, q)
        alpha = torch.where(dq > 0, rz / dq, 0.0)
        x = x + alpha * d
        r = r - alpha * q
        rz_before = rz.clamp(min=1e-300)
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
