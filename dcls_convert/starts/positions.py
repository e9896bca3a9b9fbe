"""Find positions of elements on a grid, and then between its points.

An element spreads over the cells of the box in which kernels are fitted: this is its atom, a vector
(S,). For given positions, the best weights are those of linear least squares. So an element is
moved to the place whose atom, together with the atoms of the other elements, leaves the least
error. If r is what the others leave of a target, and a is what they leave of an atom, that atom
lowers the squared error by (r'a)^2 / |a|^2.

Elements are added one after the other: orthogonal least squares, doi:10.1080/00207178908953472.
Now and then, each moves in turn while the others stay: coordinate exchange,
doi:10.1080/00401706.1995.10485889.

Axes: N kernel lines (see `layers/elements.py`), L layers, E elements, A axes, S cells of the box, J
candidates: the places to choose from.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .boxes import Box

STEPS_PER_CELL = (4, 2, 1)  # of the grid: the first with which it has at most this many points
MAX_POINTS = 1200
MAX_POINTS_BY_COUNT = 300  # for errors at every count, which take more steps
# All elements are moved again when their number has grown by this factor. Moving them more often
# takes longer, and finds hardly better places.
MOVE_AT_GROWTH = 1.5
MOVE_AT_GROWTH_BY_COUNT = 1.1  # for errors at every count
REFINEMENTS = 3  # how often the last step is halved, beginning with half a step of the grid
# Added to the energy of atoms, as a share of the energy of an element on a cell. It bounds the
# weights of elements that nearly coincide.
ATOM_RIDGE = 1e-4
MIN_ENERGY = 1e-12  # of a cell whose input never varies
FLOATS_AT_ONCE = 2_000_000  # of the largest tensor; larger ones leave the CPU's cache


class LineRoots(NamedTuple):
    """Square roots of input covariances: an error e of a line costs |e @ root|^2."""

    by_channel: Tensor  # (in_channels, S, S)
    channel_of_line: Tensor  # (N,)

    def of(self, lines: Tensor) -> Tensor:
        """Return the roots of these lines: (lines, S, S)."""
        return self.by_channel[self.channel_of_line[lines]]


@torch.no_grad()
def fit_lines(
    targets: Tensor, count: int, box: Box, roots: LineRoots | None
) -> tuple[Tensor, Tensor]:
    """Find box positions (N, E, A), and weights (N, L, E), of kernels close to the targets.

    Args:
        targets: Kernel lines (N, L, S).
        count: Elements E of each kernel.
        box: Box within which the kernels are fitted.
        roots: Roots of the lines; without them, an error e costs |e|^2.
    """
    positions = []
    weights = []
    steps_per_cell = _steps_per_cell(box, MAX_POINTS)
    for search in _searches(targets, count, box, roots, steps_per_cell):
        search.add_elements_(count, MOVE_AT_GROWTH)
        for halvings in range(1, 1 + REFINEMENTS):
            search.refine_(0.5**halvings / steps_per_cell)
        positions.append(search.positions)
        weights.append(search.weights())
    return torch.cat(positions), torch.cat(weights)


@torch.no_grad()
def errors_by_count(targets: Tensor, max_count: int, box: Box, roots: LineRoots | None) -> Tensor:
    """Return the squared error of each layer with 0 to `max_count` elements: (L, 1 + max_count).

    Elements stay on a grid. Arguments are those of `fit_lines`.
    """
    total = targets.new_zeros(targets.shape[1], 1 + max_count)
    steps_per_cell = _steps_per_cell(box, MAX_POINTS_BY_COUNT)
    for search in _searches(targets, max_count, box, roots, steps_per_cell):
        errors = [search.targets.square().sum(-1)]  # (N, L) each
        errors += search.add_elements_(max_count, MOVE_AT_GROWTH_BY_COUNT)
        total += torch.stack(errors, dim=-1).sum(0)
    return total


def _steps_per_cell(box: Box, max_points: int) -> int:
    for steps in STEPS_PER_CELL:
        if len(box.grid(steps)) <= max_points:
            break
    return steps


def _searches(
    targets: Tensor, count: int, box: Box, roots: LineRoots | None, steps_per_cell: int
) -> Iterator["_Search"]:
    """Yield searches for some of the lines each, to bound memory."""
    layers, cells = targets.shape[1:]
    vectors = layers + count  # of a line, with a number for each point of the grid
    if roots is not None:
        vectors += cells
    floats = len(box.grid(steps_per_cell)) * vectors
    for part in _parts(targets, floats):
        roots_of_part = None if roots is None else roots.of(part)
        yield _Search(targets[part], box, roots_of_part, steps_per_cell)


def squared_errors(
    targets: Tensor, positions: Tensor, weights: Tensor, box: Box, roots: LineRoots | None
) -> Tensor:
    """Return the squared errors (N, L) of elements at box positions (N, E, A), in float64."""
    errors = []
    cells = targets.shape[2]
    for part in _parts(targets, cells * (positions.shape[1] + cells)):
        error = (targets[part] - weights[part] @ box.footprint(positions[part])).double()
        if roots is not None:
            error = error @ roots.of(part).double()
        errors.append(error.square().sum(-1))
    return torch.cat(errors)


def _parts(targets: Tensor, floats_of_line: int) -> Sequence[Tensor]:
    """Split the indices of lines into parts that are computed together, to bound memory."""
    lines_at_once = max(1, FLOATS_AT_ONCE // floats_of_line)
    lines = torch.arange(len(targets), device=targets.device)
    parts: Sequence[Tensor] = torch.split(lines, lines_at_once)
    return parts


class _Search:
    """Elements of kernel lines, in a search for the least error of all layers together."""

    def __init__(
        self, targets: Tensor, box: Box, roots: Tensor | None, steps_per_cell: int
    ) -> None:
        self.box = box
        self.roots = roots
        self.targets = targets  # (N, L, S), multiplied by the roots
        self.ridge = targets.new_full((len(targets), 1), ATOM_RIDGE)  # (N, 1)
        if roots is not None:
            self.targets = targets @ roots
            cell_energy = roots.square().sum(-1).mean(-1, keepdim=True)
            self.ridge = ATOM_RIDGE * cell_energy + MIN_ENERGY
        self.lines = torch.arange(len(targets), device=targets.device)
        self.lowest = targets.new_tensor(box.lowest)
        self.highest = targets.new_tensor(box.highest)
        self.grid = box.grid(steps_per_cell).to(targets)  # (J, A)
        self.grid_atoms = self._atoms(self.grid.unsqueeze(0)).squeeze(0)  # (J, S) or (N, J, S)
        self.positions = targets.new_zeros(len(targets), 0, len(box.axes))
        self.atoms = targets.new_zeros(len(targets), 0, targets.shape[2])  # (N, E, S)

    def add_elements_(self, count: int, growth: float) -> list[Tensor]:
        """Add elements to each line, and move them at times; return the errors (N, L) with each."""
        errors = []
        last_moved = 0
        for number in range(1, 1 + count):
            place, error = self._best(self.atoms, self.grid_atoms)
            atom = self.grid_atoms.expand(len(self.lines), -1, -1)[self.lines, place]
            self.positions = torch.cat([self.positions, self.grid[place].unsqueeze(1)], 1)
            self.atoms = torch.cat([self.atoms, atom.unsqueeze(1)], 1)
            if number >= growth * last_moved or number == count:
                error = self._exchange_()
                last_moved = number
            errors.append(error)
        return errors

    def _exchange_(self) -> Tensor:
        """Move each element in turn to the best place of the grid; return the errors (N, L)."""
        grid = self.grid.expand(len(self.lines), -1, -1)
        for element in range(self.positions.shape[1]):
            errors = self._move_(element, grid, self.grid_atoms)
        return errors

    def refine_(self, step: float) -> None:
        """Move each element in turn by a step along some of the axes, or not at all."""
        axes = self.positions.shape[2]
        moves = torch.cartesian_prod(*[self.positions.new_tensor([0, -step, step])] * axes)
        for element in range(self.positions.shape[1]):
            places = self.positions[:, element, None] + moves.reshape(-1, axes)
            places = places.maximum(self.lowest).minimum(self.highest)
            self._move_(element, places, self._atoms(places))

    def weights(self) -> Tensor:
        """Return the best weights: (N, L, E)."""
        products = self.atoms @ self.targets.mT  # (N, E, L)
        return torch.cholesky_solve(products, self._factor(self.atoms)).mT

    def _move_(self, element: int, places: Tensor, atoms: Tensor) -> Tensor:
        """Move an element to the best of the places (N, J, A); return the errors (N, L).

        `atoms` are those of the places: (N, J, S), or (J, S) if they are the same for all lines.
        """
        others = torch.cat([self.atoms[:, :element], self.atoms[:, element + 1 :]], 1)
        best, errors = self._best(others, atoms)
        self.positions[:, element] = places[self.lines, best]
        self.atoms[:, element] = atoms.expand(len(self.lines), -1, -1)[self.lines, best]
        return errors

    def _best(self, others: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
        """Return which atom is best beside the others (N, E, S): (N,), and the errors (N, L)."""
        # Orthonormal vectors (N, E, S) that span the others, but for the ridge.
        span = torch.linalg.solve_triangular(self._factor(others), others, upper=False)
        residual = self.targets - (self.targets @ span.mT) @ span  # (N, L, S)
        energy = atoms.square().sum(-1) - (span @ atoms.mT).square().sum(1)  # (N, J)
        energy = energy.clamp(min=0) + self.ridge
        gains = (residual @ atoms.mT).square() / energy.unsqueeze(1)  # (N, L, J)
        best = gains.sum(1).argmax(1)
        errors = residual.square().sum(-1) - gains[self.lines, :, best]
        return best, errors.clamp(min=0)

    def _factor(self, atoms: Tensor) -> Tensor:
        """Return the Cholesky factor of the products of atoms (N, E, S), plus the ridge."""
        products = atoms @ atoms.mT
        products.diagonal(dim1=1, dim2=2).add_(self.ridge)
        factor: Tensor = torch.linalg.cholesky_ex(products)[0]
        return factor

    def _atoms(self, positions: Tensor) -> Tensor:
        """Return the atoms of box positions (N, J, A): (N, J, S)."""
        atoms = self.box.footprint(positions)
        if self.roots is None:
            return atoms
        return atoms @ self.roots
