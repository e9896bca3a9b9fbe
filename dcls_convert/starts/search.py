"""The search for the positions of a kernel line's elements, for many lines at once.

    symbol           in the code    shape       meaning
    t                `targets`      (N, L, S)   kernel lines to come close to
    A                `_atoms`       (N, E, S)   atoms of the elements that were added, as rows
    H                `_inverse`     (N, E, E)   (A A' + ridge)^-1
    w = H A t        `weights()`    (N, L, E)   the best weights of these elements
    r = t - A'w      `residuals`    (N, L, S)   what the elements leave of the targets
    a                               (S,)        the atom of one more element
    q = a - A'HA a   `unit`         (N, 1, S)   what the elements leave of this atom
    q'a + ridge      `energies`     (N, J)      the energy of this rest of the atom
    a'r = q't        `products`     (L, N, J)   the atom's product with the residuals

If the element with atom a is added, the squared error (with the ridge's share) falls by
products^2 / energies: the part of t along u = q / sqrt(energy) is gone. When the element is
removed, this part comes back. In both cases, products with u are enough to update `energies` and
`products` for all atoms of a grid.

Elements are added one after the other, each at the best point of the grid: orthogonal least
squares, doi:10.1080/00207178908953472. From time to time, each element is removed and added again:
coordinate exchange, doi:10.1080/00401706.1995.10485889. In the end, all elements are moved off the
grid together: see `refine_`.

Everything is in float64: in float32, rounding errors would add up from move to move, and small
costs would be lost beside large ones.

Axes: N kernel lines, L layers, E elements, A axes, S cells of the box, J points of the grid, R any
number of vectors.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .boxes import Box

# Positions are multiples of this part of a cell. Finer ones make no kernel noticeably closer.
STEPS_PER_CELL = 64
SLOPE_STEPS = 4  # Slopes are differences over this many steps to both sides.
# Added to the energy of atoms, as a share of the energy of an element on a cell. It bounds the
# weights of elements that nearly coincide.
ATOM_RIDGE = 1e-4
MIN_ENERGY = 1e-12  # added if there are roots, since all of them may be zero
MIN_CURVATURE = 1e-12  # added where an element has no effect
# The damping of `refine_`: its first value, and its factors after a step that succeeds or fails.
# (The first evaluation counts as a success.) With a third of these values, or three times as much,
# kernels come as close.
DAMPING = 0.1
LESS_DAMPING = 1 / 3
MORE_DAMPING = 10.0
MAX_MOVE = STEPS_PER_CELL / 4  # of an element along an axis, in one step of `refine_`


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FootprintTables:
    """Footprints of elements in a box, tabulated.

    Positions are counted in steps from the lowest position in the box.
    """

    box: Box
    profiles: list[Tensor]  # (steps, S) of each axis; see `Box.profiles`
    last: Tensor  # (A,): the last step along each axis
    grid: Tensor  # (J, A): the positions at which elements are added
    grid_footprints: Tensor  # (J, S)

    @classmethod
    def of(cls, box: Box, points_per_cell: int, example: Tensor) -> Self:
        """Return the tables of a box, whose grid has `points_per_cell` points along each axis.

        `example` is a tensor with the dtype and device of the tables.
        """
        profiles = [profile.to(example) for profile in box.profiles(STEPS_PER_CELL)]
        axes = []
        for profile in profiles:
            steps = torch.arange(len(profile), device=example.device)
            axes.append(steps[:: STEPS_PER_CELL // points_per_cell])
        grid = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        return cls(
            box=box,
            profiles=profiles,
            last=grid[-1],
            grid=grid,
            grid_footprints=_footprints(profiles, grid),
        )

    def at(self, steps: Tensor) -> Tensor:
        """Return the footprints of elements at these steps (N, E, A): (N, E, S)."""
        return _footprints(self.profiles, steps)

    def slopes_at(self, steps: Tensor) -> Tensor:
        """Return derivatives of the footprints along each axis, per step: (N, A * E, S)."""
        slopes = []
        for axis, profile in enumerate(self.profiles):
            step = steps[..., axis]
            before = (step - SLOPE_STEPS).clamp(min=0)
            after = (step + SLOPE_STEPS).clamp(max=len(profile) - 1)
            distance = (after - before).clamp(min=1)  # 0 if there is one position
            slope = embedding(after, profile) - embedding(before, profile)
            slope /= distance.unsqueeze(-1)
            for other, other_profile in enumerate(self.profiles):
                if other != axis:
                    slope *= embedding(steps[..., other], other_profile)
            slopes.append(slope)
        return torch.cat(slopes, dim=1)


def _footprints(profiles: list[Tensor], steps: Tensor) -> Tensor:
    """Return the footprints of elements at these steps (..., A): (..., S)."""
    footprints = embedding(steps[..., 0], profiles[0])
    for axis, profile in enumerate(profiles[1:], start=1):
        footprints *= embedding(steps[..., axis], profile)
    return footprints


class Search:
    """Elements of kernel lines, in a search for the least error of all layers together."""

    def __init__(
        self, targets: Tensor, count: int, tables: FootprintTables, roots: Tensor | None
    ) -> None:
        """Start without elements.

        Args:
            targets: Kernel lines (N, L, S).
            count: Elements of each line, when all are added.
            tables: Footprints in the box.
            roots: Roots of the lines (N, S, S), if there are any.
        """
        lines, _, cells = targets.shape
        self.tables = tables
        self.roots = roots
        self.targets = self._times_roots(targets)
        ridge = targets.new_full((lines, 1), ATOM_RIDGE)
        grid_energies = tables.grid_footprints.square().sum(1).expand(lines, -1)
        if roots is not None:
            ridge = ATOM_RIDGE * roots.square().sum(-1).mean(-1, keepdim=True) + MIN_ENERGY
            grid_energies = (tables.grid_footprints @ roots).square_().sum(2)
        self.ridge = ridge  # (N, 1)
        # The elements that were added so far:
        self.count = 0
        self.steps = tables.grid.new_zeros(lines, count, len(tables.profiles))
        self._atoms = targets.new_zeros(lines, count, cells)  # A
        self._inverse = targets.new_zeros(lines, count, count)  # H
        # What these elements leave of the targets (N, L, S), and of the grid's atoms:
        self.residuals = self.targets.clone()
        products = self._along_grid(self.targets)
        self.products = products.transpose(0, 1).contiguous()  # (L, N, J): with the targets
        self.energies = grid_energies + ridge  # (N, J)

    def positions(self) -> Tensor:
        """Return the box positions of the elements: (N, E, A)."""
        lowest = self.targets.new_tensor(self.tables.box.lowest)
        return lowest + self.steps / STEPS_PER_CELL

    def weights(self) -> Tensor:
        """Return the best weights: (N, L, E)."""
        products = self._atoms @ self.targets.mT  # (N, E, L)
        return torch.cholesky_solve(products, self._factor(self._atoms)).mT

    def add_elements_(self, growth: float) -> list[Tensor]:
        """Add all elements on the grid, one by one, and sometimes move the present ones.

        Args:
            growth: All present elements are moved when their number has grown by this factor since
                the last time, and in the end.

        Returns:
            The squared errors (N, L) with 0, 1, ... elements, without the ridge's share.
        """
        errors = [self.residuals.square().sum(2)]
        count = self.steps.shape[1]
        last_moved = 1  # A single element is at the best point.
        for number in range(1, 1 + count):
            self.count = number
            self._put_(number - 1)
            if number > 1 and (number >= growth * last_moved or number == count):
                for element in range(number):
                    self._remove_(element)
                    self._put_(element)
                last_moved = number
            errors.append(self.residuals.square().sum(2))
        return errors

    def _put_(self, element: int) -> None:
        """Add an element at the best point of the grid."""
        gains = self.products[0].square()  # (N, J)
        for products in self.products[1:]:
            gains.addcmul_(products, products)
        best = gains.div_(self.energies).argmax(1)
        point = self.tables.grid[best]  # (N, A)
        atom = self._times_roots(self.tables.at(point.unsqueeze(1)))  # (N, 1, S)
        atoms = self._atoms[:, : self.count]
        inverse = self._inverse[:, : self.count, : self.count]
        # How the other elements replace this one. The element's own row of the inverse is zero.
        shares = (atom @ atoms.mT) @ inverse  # (N, 1, E)
        unit = torch.baddbmm(atom, shares, atoms, alpha=-1)  # q
        energy = (unit * atom).sum(2, keepdim=True) + self.ridge.unsqueeze(2)
        scale = energy.rsqrt()
        self._change_along_(unit.mul_(scale), -1)
        shares[:, :, element] = -1
        shares.mul_(scale)
        inverse.addcmul_(shares.mT, shares)
        self.steps[:, element] = point
        atoms[:, element] = atom.squeeze(1)

    def _remove_(self, element: int) -> None:
        """Remove an element."""
        inverse = self._inverse[:, : self.count, : self.count]
        row = inverse[:, element : element + 1]  # (N, 1, E)
        shares = row * row[:, :, element : element + 1].rsqrt()
        self._change_along_(shares @ self._atoms[:, : self.count], 1)
        inverse.addcmul_(shares.mT, shares, value=-1)

    def _change_along_(self, unit: Tensor, sign: int) -> None:
        """Add the part along unit vectors (N, 1, S) to what the elements leave, or subtract it."""
        of_targets = self.targets @ unit.mT  # (N, L, 1)
        of_grid = self._along_grid(unit).squeeze(1)  # (N, J)
        self.residuals.addcmul_(of_targets, unit, value=sign)
        self.products.addcmul_(of_targets.transpose(0, 1), of_grid, value=sign)
        self.energies.addcmul_(of_grid, of_grid, value=sign)

    def refine_(self, iterations: int) -> None:
        """Move all elements together, off the grid, by the Levenberg-Marquardt method.

        Afterwards, no elements can be added: `energies` and `products` are not updated.
        """
        best = trial = self.steps
        lines, count, axes = trial.shape
        least_error = self.targets.new_full((lines,), torch.inf)
        damping = self.targets.new_full((lines, 1), DAMPING)
        gradient = self.targets.new_zeros(lines, axes * count, 1)
        curvature = self.targets.new_zeros(lines, axes * count, axes * count)
        for _ in range(1 + iterations):
            error, new_gradient, new_curvature = self.quadratic_model(trial)
            is_better = error < least_error
            least_error = torch.where(is_better, error, least_error)
            damping *= torch.where(is_better, LESS_DAMPING, MORE_DAMPING).unsqueeze(1)
            is_better = is_better[:, None, None]
            best = torch.where(is_better, trial, best)
            gradient = torch.where(is_better, new_gradient, gradient)
            curvature = torch.where(is_better, new_curvature, curvature)
            damped = curvature.clone()
            diagonal = damped.diagonal(dim1=1, dim2=2)
            diagonal.add_(damping * (diagonal + diagonal.mean(1, keepdim=True)) + MIN_CURVATURE)
            factor = torch.linalg.cholesky_ex(damped)[0]
            move = torch.cholesky_solve(gradient, factor).reshape(lines, axes, count).mT
            move = move.clamp(-MAX_MOVE, MAX_MOVE).round().long()
            trial = (best + move).clamp(min=0).minimum(self.tables.last)
        self.steps = best
        self._atoms = self._times_roots(self.tables.at(best))

    def quadratic_model(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the error at these steps (N, E, A), and a quadratic model of it around them.

        Weights follow from positions (variable projection, doi:10.1137/0710036). Let w_e be an
        element's weight, and d_e the derivative of its atom. With fixed weights, w_e d_e would be a
        column of the Jacobian. Since the weights follow, the column is only what the elements leave
        of w_e d_e (doi:10.1007/BF01932995).

        Returns:
            The squared error of all layers (N,), without the targets' squares, which are constant;
            minus half its gradient (N, A * E, 1); half its approximate Hessian
            (N, A * E, A * E).
        """
        lines, count, axes = steps.shape
        layers = self.targets.shape[1]
        atoms = self._times_roots(self.tables.at(steps))
        slopes = self._times_roots(self.tables.slopes_at(steps))  # (N, A * E, S)
        others = torch.cat([self.targets, slopes], dim=1)
        products = atoms @ others.mT  # (N, E, L + A * E)
        replaced = torch.cholesky_solve(products, self._factor(atoms))
        weights = replaced[:, :, :layers]
        error = -(weights * products[:, :, :layers]).sum((1, 2))
        # What the elements leave of the slopes, times the targets and slopes.
        left = torch.baddbmm(
            slopes @ others.mT, products[:, :, layers:].mT, replaced, alpha=-1
        )  # (N, A * E, L + A * E)
        with_targets = left[:, :, :layers].reshape(lines, axes, count, layers)
        gradient = (with_targets * weights.unsqueeze(1)).sum(3)
        with_slopes = left[:, :, layers:].reshape(lines, axes, count, axes, count)
        curvature = with_slopes * (weights @ weights.mT)[:, None, :, None, :]
        size = axes * count
        return error, gradient.reshape(lines, size, 1), curvature.reshape(lines, size, size)

    def _factor(self, atoms: Tensor) -> Tensor:
        """Return the Cholesky factor of the products of atoms (N, E, S), plus the ridge."""
        products = atoms @ atoms.mT
        products.diagonal(dim1=1, dim2=2).add_(self.ridge)
        factor: Tensor = torch.linalg.cholesky_ex(products)[0]
        return factor

    def _times_roots(self, footprints: Tensor) -> Tensor:
        """Return the atoms (N, R, S) of footprints (N, R, S)."""
        return footprints if self.roots is None else footprints @ self.roots

    def _along_grid(self, vectors: Tensor) -> Tensor:
        """Return the products of vectors (N, R, S) with the atoms of the grid: (N, R, J)."""
        if self.roots is not None:
            vectors = vectors @ self.roots.mT
        return vectors @ self.tables.grid_footprints.T
