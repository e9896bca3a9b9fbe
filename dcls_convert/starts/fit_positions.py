"""Fit positions that a tie group shares, and weights for each layer, to given kernels.

For given positions, the best weights solve a linear least-squares problem. The positions are
refined by Levenberg-Marquardt steps on the residual that the best weights leave. This is variable
projection, doi:10.1137/0710036, with Kaufman's Jacobian, doi:10.1007/BF01932995.

Axes: N kernel lines (see `layers/elements.py`), L layers, E elements, A axes, S cells of the box,
flat.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .batched_linalg import (
    cat,
    in_layout_of,
    lines_innermost,
    matmul,
    solve_positive_definite,
    sum_last,
)
from .boxes import Box, product_of_profiles
from .fit_settings import FLOATS_IN_CACHE, MAX_ROWS_INNERMOST, FitSettings

# Bounds that keep divisors above zero; small compared with targets, which are of order 1.
MIN_DIVISOR = 1e-30  # of conjugate gradients, where a line has converged
MIN_CELL_ENERGY = 1e-12  # of covariance roots, for a channel without input
# Damping multiplies the curvature's diagonal plus a floor, which is the sum of these two.
MIN_DIAGONAL_SHARE = 1e-3  # share of the mean diagonal
MIN_DIAGONAL = 1e-12  # for a curvature of zero
MIN_DAMPING_TERM = 1e-9  # added to the curvature's diagonal whatever the damping


class _State(NamedTuple):
    """Box positions, the best weights for them, and the quadratic model of the cost there."""

    box_positions: Tensor  # (N, E, A), in cells from the first cell of the box
    weights: Tensor  # (N, L, E)
    cost: Tensor  # (N,): squared residual, plus the ridge's penalty
    # (N, A, E): minus half the gradient of the cost with respect to the box positions.
    descent: Tensor
    # (N, A * E, A * E): Gauss-Newton approximation of half the second derivative of the cost.
    curvature: Tensor

    def better_of(self, other: "_State") -> "_State":
        """Return the state with the smaller cost for each line; this one if costs are equal."""
        improved = other.cost < self.cost  # (N,)
        chosen = []
        for mine, theirs in zip(self, other, strict=True):
            by_line = improved.reshape(-1, *[1] * (mine.dim() - 1))
            chosen.append(torch.where(by_line, theirs, mine))
        return _State(*chosen)


@torch.no_grad()
def fit_lines(
    targets: Tensor,
    starts: Tensor,
    box: Box,
    *,
    settings: FitSettings,
    covariance_roots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fit box positions (N, E, A) and weights (N, L, E) so that kernels are close to the targets.

    A round is `settings.steps_per_round` steps. After each round, each line drops the worse half of
    its starts, until one is left. This one gets the rounds that remain.

    Args:
        targets: (N, L, S), of order 1.
        starts: Box positions (starts, N, E, A) to start from.
        box: Box within which the kernels are fitted.
        settings: Length of the fit, ridge and damping.
        covariance_roots: (N, S, S). With them, an error e of a line costs |e @ root|^2, else |e|^2.
    """
    if covariance_roots is not None:
        # Scaled so that targets times roots are of order 1.
        norms = (targets @ covariance_roots).flatten(1).norm(dim=1)
        covariance_roots = covariance_roots / torch.where(norms > 0, norms, 1.0)[:, None, None]
    problem = _make_problem(targets, box, covariance_roots, settings.ridge)
    search = _LevenbergMarquardt(problem, starts.flatten(0, 1), settings)
    all_fits = torch.arange(len(search.box_positions), device=targets.device)
    remaining_fits = all_fits.reshape(len(starts), -1)  # (starts, N): fit indices
    rounds_left = settings.rounds
    if covariance_roots is not None:
        rounds_left = settings.rounds_for_outputs
    while len(remaining_fits) > 1:
        search.refine_(remaining_fits.flatten(), 1)
        rounds_left -= 1
        order = search.cost[remaining_fits].argsort(dim=0, stable=True)
        starts_left = (len(remaining_fits) + 1) // 2
        remaining_fits = remaining_fits.gather(0, order[:starts_left])
    best_fits = remaining_fits[0]
    search.refine_(best_fits, rounds_left)  # does nothing if dropping starts took all rounds
    return search.box_positions[best_fits], search.weights[best_fits]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """The kernels to approximate, and how their errors are weighted."""

    box: Box
    targets: Tensor  # (N, L, S); multiplied by the covariance roots, if there are any
    covariance_roots: Tensor | None  # (N, S, S)
    ridge: Tensor  # (N, 1): proportional to the energy of an element in the middle of a cell

    def map(self, change: Callable[[Tensor], Tensor]) -> "_Problem":
        """Apply a change to each tensor: a selection of lines, or another memory layout."""
        covariance_roots = None
        if self.covariance_roots is not None:
            covariance_roots = change(self.covariance_roots)
        return replace(
            self,
            targets=change(self.targets),
            covariance_roots=covariance_roots,
            ridge=change(self.ridge),
        )

    def solve(self, box_positions: Tensor) -> _State:
        """Return the best weights for the box positions, and the quadratic model of the cost."""
        elements, axes = box_positions.shape[1:]
        ridge = self.ridge
        footprint, slopes = self._footprint_and_slopes(box_positions)  # (N, E, S), (N, A * E, S)
        normal = matmul(footprint, footprint.mT)
        normal.diagonal(dim1=1, dim2=2).add_(ridge)
        # The pseudo-inverse of the footprint; a target times it gives the best weights.
        pseudo_inverse = solve_positive_definite(normal, footprint)  # (N, E, S)
        weights = matmul(self.targets, pseudo_inverse.mT)  # (N, L, E)
        residual = self.targets - matmul(weights, footprint)  # (N, L, S)
        squared_residual = residual.square().flatten(1).sum(1)
        penalty = ridge[:, 0] * weights.square().flatten(1).sum(1)
        cost = squared_residual + penalty
        slopes_by_axis = slopes.reshape(-1, axes, *footprint.shape[1:])  # (N, A, E, S)
        back_projected = matmul(weights.mT, residual).unsqueeze(1)  # (N, 1, E, S)
        descent = sum_last(slopes_by_axis * back_projected)
        # Kaufman's Jacobian: the part of the slopes that no change of the weights makes up for.
        projected = slopes - matmul(matmul(slopes, pseudo_inverse.mT), footprint)
        curvature = matmul(projected, slopes.mT)
        weight_products = matmul(weights.mT, weights)  # (N, E, E)
        # The curvature has an (E, E) block for each pair of axes.
        for rows in torch.split(curvature, elements, 1):
            for block in torch.split(rows, elements, 2):
                block *= weight_products
        return _State(
            box_positions=box_positions,
            weights=weights,
            cost=torch.where(cost.isfinite(), cost, torch.inf),
            descent=descent,
            curvature=curvature,
        )

    def _footprint_and_slopes(self, box_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the footprint (N, E, S), and its derivatives (N, A * E, S) by the box positions.

        Derivatives are ordered axis by axis. Both are multiplied by the covariance roots, if there
        are any.
        """
        profiles = []
        profile_slopes = []
        for axis, side in enumerate(self.box.sides):
            profile, slope = self.box.normalised_profile_and_slope(box_positions[..., axis], side)
            profiles.append(in_layout_of(box_positions, profile))
            profile_slopes.append(in_layout_of(box_positions, slope))
        slopes_by_axis = []
        for axis, slope in enumerate(profile_slopes):
            slopes_by_axis.append(
                product_of_profiles([*profiles[:axis], slope, *profiles[axis + 1 :]])
            )
        footprint = product_of_profiles(profiles)
        slopes = cat(slopes_by_axis, 1)
        if self.covariance_roots is None:
            return footprint, slopes
        return matmul(footprint, self.covariance_roots), matmul(slopes, self.covariance_roots)


def _make_problem(
    targets: Tensor, box: Box, covariance_roots: Tensor | None, relative_ridge: float
) -> _Problem:
    ridge = torch.full_like(targets[:, :1, 0], relative_ridge)
    if covariance_roots is not None:
        targets = targets @ covariance_roots
        cell_energy = covariance_roots.square().sum(-1).mean(-1, keepdim=True)  # (N, 1)
        ridge = ridge * cell_energy.clamp(min=MIN_CELL_ENERGY)
    return _Problem(box=box, targets=targets, covariance_roots=covariance_roots, ridge=ridge)


class _LevenbergMarquardt:
    """Levenberg-Marquardt on many fits at once, each with its own damping.

    A fit keeps a step only if its cost falls.

    A fit is one line of the problem from one start. Line i of N lines, from start s, has the fit
    index s * N + i. There are F fits.
    """

    def __init__(self, problem: _Problem, start: Tensor, settings: FitSettings) -> None:
        self.problem = problem
        self.settings = settings
        # Made once: copies to a GPU are slow.
        self.lowest = start.new_tensor(problem.box.lowest)  # (A,)
        self.highest = start.new_tensor(problem.box.highest)  # (A,)
        self.box_positions = self.clamp_to_box(start)  # (F, E, A)
        layers = problem.targets.shape[1]
        self.weights = start.new_zeros(len(start), layers, start.shape[1])
        self.cost = start.new_full((len(start),), torch.inf)
        self.damping = start.new_full((len(start),), settings.initial_damping)

    def clamp_to_box(self, box_positions: Tensor) -> Tensor:
        """Return the positions, those outside the box's limits moved to them."""
        return box_positions.maximum(self.lowest).minimum(self.highest)

    def refine_(self, fit_indices: Tensor, rounds: int) -> None:
        """Refine these fits until their costs no longer fall, for at most `rounds` rounds."""
        fits_at_once = len(fit_indices)
        if fit_indices.device.type == "cpu":
            coordinates = self.box_positions[0].numel()
            cells = self.problem.targets.shape[2]
            floats_of_fit = coordinates * (coordinates + 2 * cells)
            fits_at_once = max(1, FLOATS_IN_CACHE // floats_of_fit)
        for _ in range(rounds):
            parts = torch.split(fit_indices, fits_at_once)
            still_gaining = torch.cat([self._refine_one_round_(part) for part in parts])
            fit_indices = fit_indices[still_gaining]
            if not len(fit_indices):
                break

    def _refine_one_round_(self, fit_indices: Tensor) -> Tensor:
        """Take the steps of one round, and return which of the fits still gain: (fits,)."""
        line_indices = fit_indices % len(self.problem.targets)
        problem = self.problem.map(lambda tensor: tensor[line_indices])
        box_positions = self.box_positions[fit_indices]
        damping = self.damping[fit_indices]
        rows_of_largest_matrix = box_positions[0].numel()
        if problem.covariance_roots is not None:
            rows_of_largest_matrix = max(rows_of_largest_matrix, problem.targets.shape[2])
        if rows_of_largest_matrix <= MAX_ROWS_INNERMOST:
            problem = problem.map(lines_innermost)
            box_positions = lines_innermost(box_positions)
        settings = self.settings
        state = problem.solve(box_positions)
        first_cost = state.cost
        for _ in range(settings.steps_per_round):
            step = _step(state, damping, settings)
            trial = problem.solve(self.clamp_to_box(state.box_positions + step))
            improved = trial.cost < state.cost
            damping_factor = torch.where(
                improved, settings.damping_after_gain, settings.damping_after_failure
            )
            damping = (damping * damping_factor).clamp(settings.min_damping, settings.max_damping)
            state = state.better_of(trial)
        self.box_positions[fit_indices] = state.box_positions
        self.weights[fit_indices] = state.weights
        self.cost[fit_indices] = state.cost
        self.damping[fit_indices] = damping
        return state.cost < first_cost * (1 - settings.min_gain)


def _step(state: _State, damping: Tensor, settings: FitSettings) -> Tensor:
    """Return the step (N, E, A) that nearly minimises the damped quadratic model of the cost.

    Solves (curvature + diag(damping_term)) x = descent by conjugate gradients with a diagonal
    preconditioner, in the notation of Shewchuk (1994), B3.
    """
    diagonal = state.curvature.diagonal(dim1=1, dim2=2)  # (N, A * E)
    floor = MIN_DIAGONAL_SHARE * diagonal.mean(dim=1, keepdim=True) + MIN_DIAGONAL
    damping_term = damping[:, None] * (diagonal + floor) + MIN_DAMPING_TERM  # (N, A * E)
    inverse_diagonal = 1 / (diagonal + damping_term)
    r = state.descent.flatten(1)  # (N, A * E)
    d = inverse_diagonal * r
    rz = (r * d).sum(1, keepdim=True)
    x = torch.zeros_like(r)
    for _ in range(settings.conjugate_gradient_steps):
        q = damping_term * d + matmul(d[:, None], state.curvature)[:, 0]
        alpha = rz / (d * q).sum(1, keepdim=True).clamp(min=MIN_DIVISOR)
        x = x + alpha * d
        r = r - alpha * q
        z = inverse_diagonal * r
        rz_before = rz
        rz = (r * z).sum(1, keepdim=True)
        beta = rz / rz_before.clamp(min=MIN_DIVISOR)
        d = z + beta * d
    step = x.reshape(state.descent.shape).mT
    finite = step.nan_to_num(nan=0, posinf=0, neginf=0)
    return finite.clamp(-settings.longest_step, settings.longest_step)
