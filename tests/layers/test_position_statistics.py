"""Statistics of positions: closed forms, and an oracle in plain loops."""

import itertools
import math

import pytest
import torch

from dcls_convert.layers.interpolation import position_limits
from dcls_convert.layers.position_statistics import border_share, mean_distance, overlap_share, spread


def grid(*sides):
    """All cells of a window as the elements of one kernel: (A, 1, 1, cells)."""
    axes = [range(low, high + 1) for low, high in map(position_limits, sides)]
    return torch.tensor(list(itertools.product(*axes)), dtype=torch.float64).T.reshape(len(sides), 1, 1, -1)


def drawn(*shape, scale=2.0, dtype=torch.float64):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("sides", [(5,), (7, 7), (8, 5), (6, 4), (3, 5, 7)])
def test_every_cell_of_a_window(sides):
    positions = grid(*sides)
    inner = math.prod(side - 2 for side in sides)
    assert border_share(positions, sides) == (math.prod(sides) - inner) / math.prod(sides)
    assert overlap_share(positions) == 0  # neighbours are exactly one cell apart
    assert overlap_share(positions, 1 + 1e-9) == 1
    for found, side in zip(spread(positions), sides, strict=True):
        low, high = position_limits(side)
        assert found == pytest.approx(math.sqrt(sum(cell**2 for cell in range(low, high + 1)) / side))


def test_elements_in_the_centre_overlap_and_have_no_spread():
    positions = torch.zeros(2, 3, 1, 4)
    assert (border_share(positions, (5, 5)), overlap_share(positions)) == (0, 1)
    assert (spread(positions), mean_distance(positions)) == ((0, 0), 0)


def test_a_single_element_overlaps_with_none():
    assert overlap_share(torch.zeros(2, 3, 1, 1)) == 0


def test_the_distance_is_euclidean_and_within_a_kernel():
    pair = torch.tensor([[0.0, 0.8], [0.0, 0.8]]).reshape(2, 1, 1, 2)  # 1.13 cells apart, 0.8 along each axis
    assert overlap_share(pair) == 0
    assert overlap_share(pair, 1.2) == 1
    apart = torch.tensor([[0.0, 0.1], [0.0, 0.1]]).reshape(2, 2, 1, 1)  # near, but of two kernels
    assert overlap_share(apart) == 0
    mean = mean_distance(torch.tensor([[3.0, 0.0], [4.0, 1.0]]).reshape(2, 1, 1, 2))
    assert mean == (5 + 1) / 2


@pytest.mark.parametrize(("place", "share"), [(3.5, 1), (3.49, 0), (4, 1), (9, 1), (-3.5, 1), (-3.49, 0), (math.pi, 0)])
def test_the_border_is_half_a_cell_wide_on_both_sides_of_both_axes(place, share):
    for positions in (torch.tensor([place, 0.0]), torch.tensor([0.0, place])):
        assert border_share(positions.double().reshape(2, 1, 1, 1), (9, 9)) == share


def test_sides_of_one_cell_have_no_border():
    positions = torch.zeros(2, 1, 1, 4)
    assert border_share(positions, (9, 1)) == 0


def test_half_precision_is_compared_exactly():
    positions = torch.tensor([1.0, 2**-9]).reshape(1, 1, 1, 2)  # their difference would be 1 in bfloat16
    assert overlap_share(positions.bfloat16()) == overlap_share(positions) == 1


def slow_overlap(positions, distance):
    kernels = positions.reshape(positions.shape[0], -1, positions.shape[-1]).permute(1, 2, 0).tolist()
    overlapping = sum(
        any(math.dist(one, other) < distance for index, other in enumerate(kernel) if index != own)
        for kernel in kernels
        for own, one in enumerate(kernel)
    )
    return overlapping / math.prod(positions.shape[1:])


def slow_border(positions, size, margin):
    elements = positions.reshape(positions.shape[0], -1).T.tolist()
    at_border = 0
    for element in elements:
        limits = [position_limits(side) for side in size]
        at_border += any(
            place <= low + margin or place >= high - margin
            for place, (low, high) in zip(element, limits, strict=True)
            if high > low
        )
    return at_border / len(elements)


SHAPES = [(1, 4, 1, 6), (2, 3, 2, 5), (2, 8, 1, 13), (3, 2, 2, 4), (2, 3, 1, 4, 7)]  # the last with a dense axis


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("distance", [0.5, 1.0, 2.0])
def test_shares_are_those_of_plain_loops(shape, distance):
    positions, size = drawn(*shape), (5, 8, 3)[: shape[0]]
    assert overlap_share(positions, distance) == slow_overlap(positions, distance)
    assert border_share(positions, size, distance) == slow_border(positions, size, distance)
    for found, coordinate in zip(spread(positions), positions, strict=True):
        assert found == pytest.approx(math.sqrt(sum(c * c for c in coordinate.flatten().tolist()) / coordinate.numel()))
    elements = positions.reshape(shape[0], -1).T.tolist()
    assert mean_distance(positions) == pytest.approx(sum(map(math.hypot, *zip(*elements, strict=True))) / len(elements))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 7, 40, 200])
def test_chunks_change_nothing(shape, most):
    positions = drawn(*shape)
    assert overlap_share(positions, most_distances=most) == overlap_share(positions)
