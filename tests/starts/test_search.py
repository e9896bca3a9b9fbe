"""The search for positions: its algebra, and how close it comes to the best positions."""

import itertools
import math

import pytest
import torch

from dcls_convert.layers.interpolation import INTERPOLATIONS
from dcls_convert.starts import search as search_module
from dcls_convert.starts.boxes import Box
from dcls_convert.starts.positions import (
    MOVE_AT_GROWTH,
    MOVE_AT_GROWTH_BY_COUNT,
    errors_by_count,
    fit_lines,
)
from dcls_convert.starts.search import ATOM_RIDGE, STEPS_PER_CELL, FootprintTables, Search

NEVER = math.inf  # growth at which elements are moved before all are added
EXAMPLE = torch.empty(0, dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def search_in(kernel_size, count, interpolation="bilinear", *, lines=8, layers=2, with_roots=False):
    """Start a search for elements of random kernel lines, in windows of 17 cells a side."""
    dims = len(kernel_size)
    box = Box(kernel_size, (1,) * dims, (17,) * dims, interpolation)
    tables = FootprintTables.of(box, 4, EXAMPLE)
    cells = math.prod(box.lengths)
    roots = random(lines, cells, cells, seed=1) if with_roots else None
    return Search(random(lines, layers, cells), count, tables, roots)


def least_errors(search, atoms):
    """Return the least squared errors (N, L) with these atoms (N, E, S), the ridge's included."""
    products = atoms @ atoms.mT
    products.diagonal(dim1=1, dim2=2).add_(search.ridge)
    with_targets = atoms @ search.targets.mT
    solved = torch.linalg.solve(products, with_targets)
    return search.targets.square().sum(2) - (with_targets * solved).sum(1)


def atoms_at(search, steps):
    footprints = search.tables.at(steps)
    return footprints if search.roots is None else footprints @ search.roots


def test_the_example_of_the_positions_module_is_what_a_search_gives():
    box = Box((3,), (1,), (7,), "bilinear")
    tables = FootprintTables.of(box, 4, EXAMPLE)
    kernel_line = torch.tensor([[[1.0, 4.0, 2.0]]], dtype=torch.float64)
    search = Search(kernel_line, 2, tables, None)
    errors = search.add_elements_(NEVER)
    assert [round(float(error), 5) for error in errors] == [21, 1.4, 0.4]
    assert search.positions().flatten().tolist() == [1.25, 0]
    torch.testing.assert_close(
        search.weights().flatten(), torch.tensor([5.6, 1.0], dtype=torch.float64), rtol=0, atol=1e-3
    )
    search.refine_(5)
    assert search.positions().flatten().tolist() == [1.328125, 0]
    kernel = (search.weights() @ search.tables.at(search.steps)).flatten()
    assert kernel.round(decimals=2).tolist() == [1, 4.02, 1.96]
    assert round(float((kernel - kernel_line).square().sum()), 3) == 0.002


@pytest.mark.parametrize("with_roots", [False, True])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(("kernel_size", "count"), [((5, 3), 8), ((9,), 4), ((3, 2, 3), 6)])
def test_what_moves_keep_up_to_date_is_what_least_squares_gives(
    kernel_size, count, interpolation, with_roots
):
    """Errors; products of the grid with what is left of targets; energies left of the grid."""
    search = search_in(kernel_size, count, interpolation, with_roots=with_roots)
    errors = search.add_elements_(MOVE_AT_GROWTH)
    atoms = atoms_at(search, search.steps)
    grid = atoms_at(search, search.tables.grid.expand(len(atoms), -1, -1))
    products = atoms @ atoms.mT
    products.diagonal(dim1=1, dim2=2).add_(search.ridge)
    with_atoms = grid @ atoms.mT  # (N, J, E)
    shares = torch.linalg.solve(products, with_atoms.mT).mT
    left = grid - shares @ atoms  # of the grid's atoms
    weights = torch.linalg.solve(products, atoms @ search.targets.mT).mT
    residuals = search.targets - weights @ atoms
    torch.testing.assert_close(errors[-1], residuals.square().sum(2), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        search.products.transpose(0, 1), search.targets @ left.mT, rtol=1e-7, atol=1e-7
    )
    energies = (left * grid).sum(2) + search.ridge
    torch.testing.assert_close(search.energies, energies, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("with_roots", [False, True])
@pytest.mark.parametrize("kernel_size", [(5, 3), (9,)])
def test_the_quadratic_model_has_the_errors_gradient_and_a_hessian_without_negative_curvature(
    kernel_size, with_roots, monkeypatch
):
    """With Gaussians, since the error of bilinear elements has kinks."""
    monkeypatch.setattr(search_module, "SLOPE_STEPS", 1)
    search = search_in(kernel_size, 4, "gaussian", layers=3, with_roots=with_roots)
    search.add_elements_(MOVE_AT_GROWTH)
    steps = search.steps.clamp(min=1).minimum(search.tables.last - 1)
    error, gradient, hessian = search.quadratic_model(steps)
    box = search.tables.box
    positions = torch.tensor(box.lowest) + steps / STEPS_PER_CELL
    positions = positions.double().requires_grad_()
    atoms = box.footprint(positions)
    if with_roots:
        atoms = atoms @ search.roots
    by_atoms = least_errors(search, atoms).sum(1)
    squares = search.targets.square().sum((1, 2))
    torch.testing.assert_close(squares + error, by_atoms, rtol=1e-9, atol=1e-9)
    (expected,) = torch.autograd.grad(by_atoms.sum(), positions)  # (N, E, A), per cell
    expected = -expected.mT / 2 / STEPS_PER_CELL
    scale = float(expected.abs().max())
    found = gradient.reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * scale)
    assert bool((torch.linalg.eigvalsh(hessian) > -1e-9 * hessian.abs().amax()).all())


@pytest.mark.parametrize("with_roots", [False, True])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_refining_makes_no_line_worse_and_ends_where_no_single_move_helps(
    interpolation, with_roots
):
    search = search_in((5, 3), 3, interpolation, lines=16, with_roots=with_roots)
    search.add_elements_(MOVE_AT_GROWTH)
    on_grid = least_errors(search, atoms_at(search, search.steps)).sum(1)
    search.refine_(30)
    errors = least_errors(search, atoms_at(search, search.steps)).sum(1)
    assert bool((errors <= on_grid * (1 + 1e-9)).all())
    if interpolation != "gaussian":  # the error has kinks, where refining may stop
        return
    for element, axis, move in itertools.product(range(3), range(2), (-1, 1)):
        there = search.steps.clone()
        there[:, element, axis] += move
        there = there.clamp(min=0).minimum(search.tables.last)
        moved = least_errors(search, atoms_at(search, there)).sum(1)
        assert bool((moved >= errors * 0.99).all())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fits_come_as_close_as_the_best_of_all_positions(count):
    """In 1-D, where all sets of positions an eighth of a cell apart can be tried."""
    targets = random(60, 2, 6)
    box = Box((6,), (1,), (16,), "bilinear")
    tables = FootprintTables.of(box, 4, EXAMPLE)
    eighths = torch.arange(0, int(tables.last) + 1, STEPS_PER_CELL // 8)
    sets = torch.combinations(eighths, count).unsqueeze(2)
    atoms = tables.at(sets)  # (sets, E, S)
    # In a cell, atoms of more than two elements depend on one another.
    ridge = ATOM_RIDGE * torch.eye(count, dtype=torch.float64)
    inverse = torch.linalg.inv(atoms @ atoms.mT + ridge)
    with_targets = torch.einsum("kes,nls->nkel", atoms, targets)
    explained = torch.einsum("nkel,kef,nkfl->nk", with_targets, inverse, with_targets)
    best = targets.square().sum() - explained.amax(1).sum()
    positions, weights = fit_lines(targets, count, box, None)
    found = (targets - weights @ box.footprint(positions)).square().sum()
    assert float(found) < 1.03 * float(best)


def test_moving_elements_before_all_are_added_brings_kernels_closer():
    moved, not_moved = [], []
    for growth, errors in ((MOVE_AT_GROWTH, moved), (NEVER, not_moved)):
        search = search_in((7, 7), 24, lines=24, layers=1)
        errors.append(search.add_elements_(growth)[-1].sum())
    assert moved[0] < 0.97 * not_moved[0]


def test_errors_by_count_are_those_of_elements_that_were_moved_at_each_count():
    targets = random(24, 1, 25)
    box = Box((5, 5), (1, 1), (17, 17), "bilinear")
    by_count = errors_by_count(targets, 16, box, None).squeeze(0)
    tables = FootprintTables.of(box, 4, EXAMPLE)
    for count in range(1, 17):
        moved = Search(targets, count, tables, None).add_elements_(MOVE_AT_GROWTH_BY_COUNT)[-1]
        assert float(by_count[count]) <= 1.1 * float(moved.sum())
