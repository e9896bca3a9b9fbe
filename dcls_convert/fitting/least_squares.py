"""Positions that a tie group shares, and weights for each layer, for kernels close to given ones.

For given positions, the weights are linear least squares. The positions are refined by
Levenberg-Marquardt steps on the residual that the best weights leave: variable projection,
doi:10.1137/0710036, with Kaufman's Jacobian, doi:10.1007/BF01932995.

A kernel line is one kernel along the learnt axes, for one output and one input channel.

Axes: N kernel lines, L layers, E elements, A axes, S cells of the box, flat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import joined, last_summed, like, lines_innermost, product, solved
from .boxes import Box, box_footprint
from .fit_settings import FLOATS_IN_CACHE, MAX_ROWS_INNERMOST, FitSettings

TINY = 1e-30  # replaces a divisor of zero


class _State(NamedTuple):
    """Places of elements, with the best weights and the quadratic model of the cost there."""

    places: Tensor  # (N, E, A), in cells of the box
    weights: Tensor  # (N, L, E)
    cost: Tensor  # (N,): squared residual, plus the ridge's penalty
    descent: Tensor  # (N, A, E): minus half the gradient of the cost by the places
    # (N, A * E, A * E): half the second derivative of the cost, by Gauss-Newton.
    curvature: Tensor

    def better_of(self, other: "_State") -> "_State":
        """For each line, the state with the smaller cost; of equal costs, this one."""
        improved = other.cost < self.cost  # (N,)
        chosen = []
        for mine, theirs in zip(self, other, strict=True):
            by_line = improved.reshape(-1, *[1] * (mine.dim() - 1))
            chosen.append(torch.where(by_line, theirs, mine))
        return _State(*chosen)


@torch.no_grad()
def fit_lines(
    targets: Tensor,
    starts: Sequence[Tensor],
    box: Box,
    *,
    settings: FitSettings,
    roots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Places (N, E, A) in the box, and weights (N, L, E), whose kernels are close to the targets.

    A look is `settings.steps_between_looks` steps, after which costs are compared. After each look,
    each line drops the worse half of its starts, until one is left, which gets the looks that
    remain.

    Args:
        targets: (N, L, S), of order 1.
        starts: Places (N, E, A) to start from.
        box: In which the kernels are fitted.
        settings: How long, and with which ridge and damping.
        roots: (N, S, S). With them, an error e of a line counts as |e @ root|^2, else as |e|^2.
    """
    if roots is not None:
        norms = (targets @ roots).flatten(1).norm(dim=1)
        roots = roots / torch.where(norms > 0, norms, 1.0)[:, None, None]
    problem = _make_problem(targets, box, roots, settings.ridge)
    run = _Run(problem, torch.cat(list(starts)), settings)
    lines = torch.arange(len(run.places), device=targets.device)
    remaining = lines.reshape(len(starts), -1)  # (starts, N): line numbers of the run
    looks = settings.max_looks if roots is None else settings.max_looks_with_roots
    while len(remaining) > 1:
        run.refine_(remaining.flatten(), 1)
        looks -= 1
        order = run.cost[remaining].argsort(dim=0, stable=True)
        kept = (len(remaining) + 1) // 2
        remaining = remaining.gather(0, order[:kept])
    best = remaining[0]
    run.refine_(best, looks)  # nothing, if dropping starts took all looks
    return run.places[best], run.weights[best]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """The kernels to be approximated, and how errors count."""

    box: Box
    targets: Tensor  # (N, L, S); with roots, multiplied by them
    roots: Tensor | None  # (N, S, S)
    ridge: Tensor  # (N, 1): in proportion to the energy of an element in the middle of a cell

    def map(self, change: Callable[[Tensor], Tensor]) -> "_Problem":
        """The same problem with each tensor changed: some lines, or another layout."""
        return replace(
            self,
            targets=change(self.targets),
            roots=None if self.roots is None else change(self.roots),
            ridge=change(self.ridge),
        )

    def solve(self, places: Tensor) -> _State:
        """The best weights for these places, and the quadratic model of the cost around them."""
        elements, axes = places.shape[1:]
        ridge = self.ridge
        footprint, slopes = self._footprint_and_slopes(places)  # (N, E, S), (N, A * E, S)
        normal = product(footprint, footprint.mT)
        normal.diagonal(dim1=1, dim2=2).add_(ridge)
        # The pseudo-inverse of the footprint: its product with a target is the weights.
        pseudo_inverse = solved(normal, footprint)  # (N, E, S)
        weights = product(self.targets, pseudo_inverse.mT)  # (N, L, E)
        residual = self.targets - product(weights, footprint)  # (N, L, S)
        squared_residual = residual.square().flatten(1).sum(1)
        penalty = ridge[:, 0] * weights.square().flatten(1).sum(1)
        cost = squared_residual + penalty
        slopes_by_axis = slopes.reshape(-1, axes, *footprint.shape[1:])  # (N, A, E, S)
        back_projected = product(weights.mT, residual).unsqueeze(1)  # (N, 1, E, S)
        descent = last_summed(slopes_by_axis * back_projected)
        # Kaufman's Jacobian: the part of the slopes for which no change of the weights makes up.
        projected = slopes - product(product(slopes, pseudo_inverse.mT), footprint)
        curvature = product(projected, slopes.mT)
        weight_products = product(weights.mT, weights)  # (N, E, E)
        for rows in torch.split(curvature, elements, 1):
            for block in torch.split(rows, elements, 2):
                block *= weight_products
        return _State(
            places=places,
            weights=weights,
            cost=torch.where(cost.isfinite(), cost, torch.inf),
            descent=descent,
            curvature=curvature,
        )

    def _footprint_and_slopes(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The footprint (N, E, S), and its derivatives by the places (N, A * E, S).

        The derivatives come axis by axis. With roots, both are multiplied by them.
        """
        profiles = []
        profile_slopes = []
        for axis, side in enumerate(self.box.sides):
            profile, slope = self.box.profile(places[..., axis], side)
            profiles.append(like(places, profile))
            profile_slopes.append(like(places, slope))
        slopes_by_axis = []
        for axis, slope in enumerate(profile_slopes):
            slopes_by_axis.append(box_footprint([*profiles[:axis], slope, *profiles[axis + 1 :]]))
        footprint = box_footprint(profiles)
        slopes = joined(slopes_by_axis, 1)
        if self.roots is None:
            return footprint, slopes
        return product(footprint, self.roots), product(slopes, self.roots)


def _make_problem(
    targets: Tensor, box: Box, roots: Tensor | None, relative_ridge: float
) -> _Problem:
    ridge = torch.full_like(targets[:, :1, 0], relative_ridge)
    if roots is not None:
        targets = targets @ roots
        cell_energy = roots.square().sum(-1).mean(-1, keepdim=True)  # (N, 1)
        ridge = ridge * cell_energy.clamp(min=1e-12)
    return _Problem(box=box, targets=targets, roots=roots, ridge=ridge)


class _Run:
    """Levenberg-Marquardt on many lines at once, each with its own damping.

    A line keeps a step only if its cost falls.

    With several starts, the run has each line of the problem once for each start: line i of start s
    has the number s * N + i.
    """

    def __init__(self, problem: _Problem, start: Tensor, settings: FitSettings) -> None:
        self.problem = problem
        self.settings = settings
        last_cells = [side - 1 for side in problem.box.sides]
        self.last_cells = start.new_tensor(last_cells)  # made once: copies to a GPU are slow
        # All that follow have an entry for each start of each line, starts * N in all.
        self.places = self.inside(start)  # (starts * N, E, A)
        layers = problem.targets.shape[1]
        self.weights = start.new_zeros(len(start), layers, start.shape[1])
        self.cost = start.new_full((len(start),), torch.inf)
        self.damping = start.new_full((len(start),), settings.initial_damping)

    def inside(self, places: Tensor) -> Tensor:
        """The places, moved into the box."""
        return places.clamp(min=0).minimum(self.last_cells)

    def refine_(self, lines: Tensor, looks: int) -> None:
        """Refine these lines, until their costs no longer fall or so many looks are done."""
        lines_at_once = len(lines)
        if lines.device.type == "cpu":
            coordinates = self.places[0].numel()
            cells = self.problem.targets.shape[2]
            floats_of_line = coordinates * (coordinates + 2 * cells)
            lines_at_once = max(1, FLOATS_IN_CACHE // floats_of_line)
        for _ in range(looks):
            parts = torch.split(lines, lines_at_once)
            still_gaining = torch.cat([self._refine_part_(part) for part in parts])
            lines = lines[still_gaining]
            if not len(lines):
                break

    def _refine_part_(self, lines: Tensor) -> Tensor:
        """Take the steps between two looks. Returns which of these lines still gain: (lines,)."""
        line_of_problem = lines % len(self.problem.targets)
        problem = self.problem.map(lambda tensor: tensor[line_of_problem])
        places = self.places[lines]
        damping = self.damping[lines]
        rows = places[0].numel()
        if problem.roots is not None:
            rows = max(rows, problem.targets.shape[2])
        if rows <= MAX_ROWS_INNERMOST:
            problem = problem.map(lines_innermost)
            places = lines_innermost(places)
        settings = self.settings
        state = problem.solve(places)
        first_cost = state.cost
        for _ in range(settings.steps_between_looks):
            step = _step(state, damping, settings)
            trial = problem.solve(self.inside(state.places + step))
            improved = trial.cost < state.cost
            factor = torch.where(
                improved, settings.damping_after_gain, settings.damping_after_failure
            )
            damping = (damping * factor).clamp(settings.min_damping, settings.max_damping)
            state = state.better_of(trial)
        self.places[lines] = state.places
        self.weights[lines] = state.weights
        self.cost[lines] = state.cost
        self.damping[lines] = damping
        return state.cost < first_cost * (1 - settings.min_gain)


def _step(state: _State, damping: Tensor, settings: FitSettings) -> Tensor:
    """The step (N, E, A) that nearly minimises the damped quadratic model of the cost.

    Conjugate gradients with the diagonal as preconditioner, in the letters of Shewchuk (1994), B3,
    for (curvature + added) x = descent.
    """
    diagonal = state.curvature.diagonal(dim1=1, dim2=2)  # (N, A * E)
    floor = 1e-3 * diagonal.mean(dim=1, keepdim=True) + 1e-12
    added = damping[:, None] * (diagonal + floor) + 1e-9
    inverse_diagonal = 1 / (diagonal + added)
    r = state.descent.flatten(1)  # (N, A * E)
    d = inverse_diagonal * r
    rz = (r * d).sum(1, keepdim=True)
    x = torch.zeros_like(r)
    for _ in range(settings.conjugate_gradient_steps):
        q = added * d + product(d[:, None], state.curvature)[:, 0]
        alpha = rz / (d * q).sum(1, keepdim=True).clamp(min=TINY)
        x = x + alpha * d
        r = r - alpha * q
        z = inverse_diagonal * r
        rz_before = rz
        rz = (r * z).sum(1, keepdim=True)
        beta = rz / rz_before.clamp(min=TINY)
        d = z + beta * d
    step = x.reshape(state.descent.shape).mT
    finite = step.nan_to_num(nan=0, posinf=0, neginf=0)
    return finite.clamp(-settings.longest_step, settings.longest_step)
