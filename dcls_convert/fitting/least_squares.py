"""Positions that the layers of a tie group share, and weights for each layer, with kernels close to given ones.

For given positions, the weights are linear least squares, in closed form. The positions are refined on the residual by
Levenberg-Marquardt steps: variable projection, doi:10.1137/0710036, with Kaufman's Jacobian,
doi:10.1007/BF01932995.
Nothing here knows of networks: a line is one kernel of the group, seen in a box of cells.

Axes: N lines, L layers, M metrics (1 for all layers, or L), E elements, A axes, S cells of the box, flat.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# How much of an element at a place (N, E) lies in each cell of an axis, (N, E, cells), and the derivative by the place.
Profile = Callable[[Tensor, int], tuple[Tensor, Tensor]]

# Share of the energy of an element in the middle of a cell; bounds the weights of elements that nearly coincide.
RIDGE = 1e-3
LONGEST_STEP = 0.5  # cells; the footprint changes its form from cell to cell
MOST_STEPS = 60
STEPS_BETWEEN_LOOKS = 10  # after each look, lines that no longer gain are left alone
LEAST_GAIN = 1e-2  # of the cost of a line, between two looks
DAMPING_AT_START, DAMPING_DOWN, DAMPING_UP = 0.1, 1 / 3, 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Where the lines stand."""

    places: Tensor  # (N, E, A), in cells of the box
    footprint: Tensor  # (N, M, E, S), in the metric
    slopes: Tensor  # (N, M, E * A, S): derivatives by the places
    weights: Tensor  # (N, L, E)
    left: Tensor  # (N, L, S): targets minus kernels, in the metric
    factor: Tensor  # (N, M, E, E): Cholesky factor of the normal equations
    cost: Tensor  # (N,): squares of what is left, and the ridge's

    def __getitem__(self, lines: Tensor) -> "_State":
        return self.paired(self, lambda own, _: own[lines])

    def paired(self, other: "_State", function: Callable[[Tensor, Tensor], Tensor]) -> "_State":
        """The state of what the function makes of each field of both."""
        return _State(**{name: function(getattr(self, name), getattr(other, name)) for name in self.__slots__})

    def better_of(self, other: "_State") -> "_State":
        gains = other.cost < self.cost
        return self.paired(other, lambda one, two: torch.where(gains.reshape(-1, *[1] * (one.dim() - 1)), two, one))

    def with_lines(self, lines: Tensor, state: "_State") -> "_State":
        return self.paired(state, lambda whole, some: whole.index_copy(0, lines, some))


def fit_lines(
    targets: Tensor, starts: Sequence[Tensor], sides: Sequence[int], profile: Profile, *, roots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Places and weights whose kernels are close to the targets, the best of all starts for each line.

    Args:
        targets: (N, L, S) kernels in their box, each line with values of the order of 1.
        starts: At least one; each (N, E, A), places in cells of the box.
        sides: The box, A integers with product S. Places stay inside it.
        profile: The interpolation.
        roots: (N, L, S, S), where the error e of a layer counts as the squares of e @ root; without it, as its own.

    Returns:
        Places (N, E, A) and weights (N, L, E).
    """
    if roots is not None:
        seen = (targets.unsqueeze(2) @ roots).flatten(1).norm(dim=1)
        roots = roots / torch.where(seen > 0, seen, 1.0)[:, None, None, None]
    problem = _Problem(targets=targets, sides=tuple(sides), profile=profile, roots=roots)
    best = functools.reduce(_State.better_of, (_refined(problem, start) for start in starts))
    return best.places, best.weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    targets: Tensor
    sides: tuple[int, ...]
    profile: Profile
    roots: Tensor | None

    def __getitem__(self, lines: Tensor) -> "_Problem":
        roots = None if self.roots is None else self.roots[lines]
        return replace(self, targets=self.targets[lines], roots=roots)

    def ridge(self) -> Tensor:
        """(N, M, 1), in proportion to what an element in the middle of a cell is worth."""
        if self.roots is None:
            return self.targets.new_full((len(self.targets), 1, 1), RIDGE)
        return RIDGE * self.roots.square().sum(-1).mean(-1, keepdim=True).clamp(min=1e-12)

    def at(self, places: Tensor) -> _State:
        """The best weights there, and what they leave."""
        footprint, slopes = _footprint(places, self.sides, self.profile)
        targets = self.targets
        if self.roots is not None:
            footprint, slopes = footprint @ self.roots, slopes @ self.roots
            targets = (targets.unsqueeze(2) @ self.roots).squeeze(2)
        normal = footprint @ footprint.mT  # (N, M, E, E)
        ridge = self.ridge().expand(normal.shape[:-1])
        factor = torch.linalg.cholesky_ex(normal + torch.diag_embed(ridge)).L
        per_metric = _by_metric(targets, footprint)  # (N, M, layers of the metric, S)
        weights = torch.cholesky_solve(footprint @ per_metric.mT, factor).mT  # (N, M, layers of the metric, E)
        left = per_metric - weights @ footprint
        cost = left.square().sum((1, 2, 3)) + (ridge.unsqueeze(2) * weights.square()).sum((1, 2, 3))
        return _State(
            places=places,
            footprint=footprint,
            slopes=slopes,
            weights=weights.flatten(1, 2),
            left=left.flatten(1, 2),
            factor=factor,
            cost=torch.where(cost.isfinite(), cost, torch.inf),
        )


def _refined(problem: _Problem, start: Tensor) -> _State:
    """Levenberg-Marquardt steps on all lines at once; each line has its own damping and keeps only steps that gain."""
    last = start.new_tensor([side - 1 for side in problem.sides])
    state = problem.at(start.clamp(min=0).minimum(last))
    damping = torch.full_like(state.cost, DAMPING_AT_START)
    done = state
    active = torch.arange(len(start), device=start.device)
    for _ in range(MOST_STEPS // STEPS_BETWEEN_LOOKS):
        before = state.cost
        for _ in range(STEPS_BETWEEN_LOOKS):
            tried = problem.at((state.places + _step(state, damping)).clamp(min=0).minimum(last))
            gains = tried.cost < state.cost
            damping = torch.where(gains, damping * DAMPING_DOWN, damping * DAMPING_UP).clamp(1e-6, 1e6)
            state = state.better_of(tried)
        done = state if len(active) == len(start) else done.with_lines(active, state)
        moving = (state.cost < before * (1 - LEAST_GAIN)).nonzero()[:, 0]
        if not len(moving):
            break
        if len(moving) < len(active):
            active, damping = active[moving], damping[moving]
            state, problem = state[moving], problem[moving]
    return done


def _step(state: _State, damping: Tensor) -> Tensor:
    """(N, E, A): where the quadratic model of the cost, damped, has its least."""
    lines, elements, axes = state.places.shape
    # The part of the slopes that the weights cannot compensate is slopes - seen' @ footprint.
    seen = torch.cholesky_solve(state.footprint @ state.slopes.mT, state.factor)  # (N, M, E, E * A)
    curvature = state.slopes @ (state.slopes - seen.mT @ state.footprint).mT  # (N, M, E * A, E * A)
    weights = _by_metric(state.weights, state.footprint)  # (N, M, layers of the metric, E)
    spread = weights.repeat_interleave(axes, dim=-1)  # (N, M, layers of the metric, E * A)
    matrix = (curvature * (spread.mT @ spread)).sum(1)  # (N, E * A, E * A)
    left = _by_metric(state.left, state.footprint)
    downhill = ((left @ state.slopes.mT) * spread).sum((1, 2))  # (N, E * A)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    floor = 1e-3 * diagonal.mean(dim=-1, keepdim=True) + 1e-12
    damped = matrix + torch.diag_embed(damping[:, None] * (diagonal + floor) + 1e-9)
    factor, failed = torch.linalg.cholesky_ex(damped)
    step = torch.cholesky_solve(downhill.unsqueeze(-1), factor).squeeze(-1)
    usable = (failed == 0)[:, None] & step.isfinite()
    step = torch.where(usable, step, 0.0).reshape(lines, elements, axes)
    return step.clamp(-LONGEST_STEP, LONGEST_STEP)


def _by_metric(of_layers: Tensor, footprint: Tensor) -> Tensor:
    """(N, L, x) -> (N, M, layers of the metric, x)."""
    lines, _, last = of_layers.shape
    return of_layers.reshape(lines, footprint.shape[1], -1, last)


def _footprint(places: Tensor, sides: Sequence[int], profile: Profile) -> tuple[Tensor, Tensor]:
    """(N, 1, E, S) and its derivatives (N, 1, E * A, S)."""
    values, slopes = zip(*(profile(places[..., axis], side) for axis, side in enumerate(sides)), strict=True)
    sloping = [spread([*values[:axis], slope, *values[axis + 1 :]]) for axis, slope in enumerate(slopes)]
    return spread(values).unsqueeze(1), torch.stack(sloping, dim=2).flatten(1, 2).unsqueeze(1)


def spread(profiles: Sequence[Tensor]) -> Tensor:
    """How elements spread over a box, from their profiles along its axes: (N, E, side) each -> (N, E, S)."""
    return functools.reduce(lambda flat, other: (flat.unsqueeze(-1) * other.unsqueeze(-2)).flatten(-2), profiles)
