"""What the tests of this room share: numbers, comparisons in float64, and what memory operations
take.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcls_convert.layers.interpolation import INTERPOLATIONS

FLOAT64_ATOL = 1e-12  # some thousand roundings of 2e-16, of values of order 1
every_interpolation = pytest.mark.parametrize("interpolation", list(INTERPOLATIONS))
# torch says so of every convolution with padding='same' and an even kernel.
even_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual, expected, atol=FLOAT64_ATOL):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class Sizes(TorchDispatchMode):
    """Collects the memory that is taken inside, beside that of the given tensors."""

    def __init__(self, given):
        super().__init__()
        self.given, self.kept = {tensor.untyped_storage().data_ptr() for tensor in given}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.kept[tensor.untyped_storage().data_ptr()] = (
                    tensor  # alive, so that no address comes twice
                )
        return result

    @property
    def pieces(self):
        """How many numbers each piece of memory holds; tensors that share one count once."""
        return [
            tensor.untyped_storage().nbytes() // tensor.element_size()
            for tensor in self.kept.values()
        ]
