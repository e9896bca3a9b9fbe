"""Algebra of many small matrices: the same in either layout, and what torch.linalg gives."""

import pytest
import torch

from dcls_convert.fitting.batches import joined, last_summed, lines_innermost, product, solved


def either_layout(*shape):
    tensor = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return [tensor, lines_innermost(tensor)]


@pytest.mark.parametrize("lines", [1, 7])
def test_products_sums_and_joins_are_those_of_torch_in_either_layout(lines):
    for one, two in zip(either_layout(lines, 3, 5), either_layout(lines, 5, 4), strict=True):
        torch.testing.assert_close(product(one, two), one @ two)
        torch.testing.assert_close(last_summed(one), one.sum(-1))
        assert torch.equal(joined([one, two.mT], 1), torch.cat([one, two.mT], 1))


@pytest.mark.parametrize("lines", [1, 7])
@pytest.mark.parametrize("size", [1, 2, 11, 12, 34])
def test_the_solution_is_that_of_torch_in_either_layout(lines, size):
    for half, right in zip(either_layout(lines, size, size + 2), either_layout(lines, size, 3), strict=True):
        matrix = product(half, half.mT)
        before = matrix.clone()
        torch.testing.assert_close(solved(matrix, right), torch.linalg.solve(before, right), rtol=1e-9, atol=1e-9)
        assert torch.equal(matrix, before)
