"""Two sets of tensors have the same hash if names, dtypes, shapes and bytes are the same."""

import pytest
import torch

from dcls_convert.checkpoints.stamp import tensors_hash


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.arange(6.0).reshape(3, 2)},
        {"a": torch.arange(6.0).reshape(2, 3).view(torch.int32)},
        # 0.0 becomes -0.0: the bytes count.
        {"a": torch.arange(6.0).reshape(2, 3) * torch.tensor([-1.0, 1, 1])},
        {"c": torch.zeros(2, 0)},
        {"d": torch.tensor(1)},
    ],
)
def test_the_hash_depends_only_on_names_dtypes_shapes_and_bytes(other):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1), "c": torch.zeros(0, 2)}
    assert tensors_hash((tensors | other).items()) != tensors_hash(tensors.items())
    transposed = tensors["a"].T.contiguous().T  # other strides
    assert tensors_hash(list((tensors | {"a": transposed}).items())[::-1]) == tensors_hash(
        tensors.items()
    )
