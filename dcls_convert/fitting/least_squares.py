"""Positions that the layers of a tie group share, and weights for each layer, with kernels close to
given ones.

For given positions, the weights are linear least squares. The positions are refined by
Levenberg-Marquardt steps: variable projection, doi:10.1137/0710036, with Kaufman's Jacobian,
doi:10.1007/BF01932995. A line is one kernel.

Axes: N lines, L layers, E elements, A axes, S cells of the box, flat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.running import in_parallel
from .batches import joined, last_summed, like, lines_innermost, product, solved
from .boxes import Box, spread

# Share of the energy of an element in the middle of a cell; bounds the weights of elements that
# nearly coincide.
RIDGE = 1e-3
LONGEST_STEP = 0.5  # cells; the footprint changes its form from cell to cell
STEPS_BETWEEN_LOOKS = 8  # after each look, lines that no longer gain are left alone
LEAST_GAIN = 1e-2  # of the cost of a line, between two looks
MOST_LOOKS = 6
MOST_LOOKS_WITH_ROOTS = 2  # for outputs: the weights are then solved for again
DAMPING_AT_START, DAMPING_DOWN, DAMPING_UP = 0.1, 1 / 3, 4.0
CONJUGATE_GRADIENTS = (
    6  # for a step; the exact step is no better, since the model of the cost is not exact
)
LINES_INNERMOST = (
    24  # rows of a line's matrices; with more, a product of them is worth a call of its own
)
FLOATS_IN_CACHE = 1_000_000  # of matrices, for the lines that a processor works on at once
TINY = 1e-30  # instead of a divisor of zero


class _State(NamedTuple):
    """Where lines stand."""

    places: Tensor  # (N, E, A), in cells of the box
    weights: Tensor  # (N, L, E)
    cost: Tensor  # (N,): squares of what is left, and the ridge's
    downhill: Tensor  # (N, A, E): minus half the derivative of the cost by the places
    # (N, A * E, A * E): half its second derivative, where the residual is linear in the places
    curvature: Tensor

    def better_of(self, other: "_State") -> "_State":
        gains = other.cost < self.cost
        pairs = zip(self, other, strict=True)
        return _State(
            *(
                torch.where(gains.reshape(-1, *[1] * (old.dim() - 1)), new, old)
                for old, new in pairs
            )
        )


@torch.no_grad()
def fit_lines(
    targets: Tensor, starts: Sequence[Tensor], box: Box, *, roots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Places (N, E, A) in the box, and weights (N, L, E), whose kernels are close to the targets
    (N, L, S), of order 1.

    Each line goes on from the start that is soon the best for it. With roots (N, S, S), errors e
    count as e @ root.
    """
    if roots is not None:
        seen = (targets @ roots).flatten(1).norm(dim=1)
        roots = roots / torch.where(seen > 0, seen, 1.0)[:, None, None]
    run = _Run(_problem(targets, box, roots), torch.cat(list(starts)))
    alive = torch.arange(len(run.places), device=targets.device).reshape(
        len(starts), -1
    )  # starts of each line
    looks = MOST_LOOKS if roots is None else MOST_LOOKS_WITH_ROOTS
    while len(alive) > 1:  # after each look, each line goes on with the better half
        run.go_on_(alive.flatten(), 1)
        alive, looks = (
            alive.gather(0, run.cost[alive].argsort(dim=0, stable=True)[: (len(alive) + 1) // 2]),
            looks - 1,
        )
    run.go_on_(alive[0], looks)
    return run.places[alive[0]], run.weights[alive[0]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    box: Box
    targets: Tensor  # with roots, these times them
    roots: Tensor | None
    ridge: Tensor  # (N, 1): in proportion to what an element in the middle of a cell is worth

    def changed(self, change: Callable[[Tensor], Tensor]) -> "_Problem":
        roots = None if self.roots is None else change(self.roots)
        return replace(self, targets=change(self.targets), roots=roots, ridge=change(self.ridge))

    def at(self, places: Tensor) -> _State:
        """The best weights there, and what they leave."""
        elements, axes = places.shape[1:]
        targets, ridge = self.targets, self.ridge
        profiles = [
            self.box.profile(places[..., axis], side) for axis, side in enumerate(self.box.sides)
        ]
        values, along = (
            [like(places, part) for part in parts] for parts in zip(*profiles, strict=True)
        )
        sloping = [
            spread([*values[:axis], slope, *values[axis + 1 :]]) for axis, slope in enumerate(along)
        ]
        footprint, slopes = spread(values), joined(sloping, 1)  # (N, E, S), (N, A * E, S)
        if self.roots is not None:
            footprint, slopes = product(footprint, self.roots), product(slopes, self.roots)
        normal = product(footprint, footprint.mT)
        normal.diagonal(dim1=1, dim2=2).add_(ridge)
        inverse = solved(normal, footprint)  # (N, E, S): its product with a target is the weights
        weights = product(targets, inverse.mT)  # (N, L, E)
        left = targets - product(weights, footprint)
        cost = left.square().flatten(1).sum(1) + ridge[:, 0] * weights.square().flatten(1).sum(1)
        by_axis = slopes.reshape(-1, axes, *footprint.shape[1:])  # (N, A, E, S)
        downhill = last_summed(by_axis * product(weights.mT, left).unsqueeze(1))
        uncompensated = slopes - product(product(slopes, inverse.mT), footprint)  # by the weights
        curvature = product(uncompensated, slopes.mT)
        together = product(weights.mT, weights)  # (N, E, E)
        for rows in torch.split(curvature, elements, 1):
            for block in torch.split(rows, elements, 2):
                block *= together
        return _State(
            places, weights, torch.where(cost.isfinite(), cost, torch.inf), downhill, curvature
        )


def _problem(targets: Tensor, box: Box, roots: Tensor | None) -> _Problem:
    ridge = torch.full_like(targets[:, :1, 0], RIDGE)
    if roots is not None:
        targets, ridge = (
            targets @ roots,
            ridge * roots.square().sum(-1).mean(-1, keepdim=True).clamp(min=1e-12),
        )
    return _Problem(box=box, targets=targets, roots=roots, ridge=ridge)


class _Run:
    """Levenberg-Marquardt steps on many lines at once; each has its own damping and keeps only
    steps that gain.

    The problem's lines stand one behind the other, once for each start.
    """

    def __init__(self, problem: _Problem, start: Tensor) -> None:
        self.problem = problem
        self.last = start.new_tensor(
            [side - 1 for side in problem.box.sides]
        )  # made once: copies to a GPU are slow
        self.places = self.inside(start)  # (N, E, A)
        self.weights = start.new_zeros(
            len(start), problem.targets.shape[1], start.shape[1]
        )  # (N, L, E)
        self.cost = start.new_full((len(start),), torch.inf)
        self.damping = start.new_full((len(start),), DAMPING_AT_START)

    def inside(self, places: Tensor) -> Tensor:
        return places.clamp(min=0).minimum(self.last)

    def go_on_(self, lines: Tensor, looks: int) -> None:
        moving, at_once = self.places[0].numel(), len(lines)
        if lines.device.type == "cpu":
            at_once = max(
                1, FLOATS_IN_CACHE // (moving * (moving + 2 * self.problem.targets.shape[2]))
            )
        for _ in range(looks):
            lines = lines[
                torch.cat(in_parallel(self._step_, torch.split(lines, at_once), lines.device))
            ]
            if not len(lines):
                break

    def _step_(self, lines: Tensor) -> Tensor:
        """Whether each of these lines still gains."""
        targets = lines % len(self.problem.targets)
        problem = self.problem.changed(lambda tensor: tensor[targets])
        places, damping = self.places[lines], self.damping[lines]
        inner = (
            problem.targets.shape[2] if problem.roots is not None else 0
        )  # of products with roots
        if max(places[0].numel(), inner) <= LINES_INNERMOST:
            problem, places = problem.changed(lines_innermost), lines_innermost(places)
        state = problem.at(places)
        before = state.cost
        for _ in range(STEPS_BETWEEN_LOOKS):
            tried = problem.at(self.inside(state.places + _step(state, damping)))
            damping = damping * torch.where(tried.cost < state.cost, DAMPING_DOWN, DAMPING_UP)
            damping, state = damping.clamp(1e-6, 1e6), state.better_of(tried)
        self.places[lines], self.weights[lines] = state.places, state.weights
        self.cost[lines], self.damping[lines] = state.cost, damping
        return state.cost < before * (1 - LEAST_GAIN)


def _step(state: _State, damping: Tensor) -> Tensor:
    """(N, E, A) to the least of the damped quadratic model, nearly: conjugate gradients, diagonally
    preconditioned."""
    diagonal = state.curvature.diagonal(dim1=1, dim2=2)
    floor = 1e-3 * diagonal.mean(dim=1, keepdim=True) + 1e-12
    more = damping[:, None] * (diagonal + floor) + 1e-9
    share = 1 / (diagonal + more)
    left = state.downhill.flatten(1)
    ahead = share * left
    size = (left * ahead).sum(1, keepdim=True)
    step = torch.zeros_like(left)
    for _ in range(CONJUGATE_GRADIENTS):
        pulled = more * ahead + product(ahead[:, None], state.curvature)[:, 0]
        rate = size / (ahead * pulled).sum(1, keepdim=True).clamp(min=TINY)
        step, left = step + rate * ahead, left - rate * pulled
        preconditioned = share * left
        size, old = (left * preconditioned).sum(1, keepdim=True), size
        ahead = preconditioned + size / old.clamp(min=TINY) * ahead
    step = step.reshape(state.downhill.shape).mT
    return step.nan_to_num(nan=0, posinf=0, neginf=0).clamp(-LONGEST_STEP, LONGEST_STEP)
