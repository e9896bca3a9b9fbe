"""Gather parameters that are sharded over processes."""

from torch import Tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole parameter, gathered (differentiably) if FSDP2 has sharded it.

    Under FSDP2, all ranks must call it.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered
