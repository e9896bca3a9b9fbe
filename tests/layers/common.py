"""Helpers of the layer tests: seeded numbers, and comparisons in float64."""

import pytest
import torch

from dcls_convert.layers.interpolation import INTERPOLATIONS

FLOAT64_ATOL = 1e-12  # a few thousand rounding errors of 2e-16, in values of order 1
every_interpolation = pytest.mark.parametrize("interpolation", list(INTERPOLATIONS))
# torch warns about every convolution with padding='same' and an even kernel.
even_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual, expected, atol=FLOAT64_ATOL):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
