"""Clamp values with the gradient of the identity, and clamp parameters in place.

Clamping in place also works in compiled programs, and under FSDP2, which shards parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def per_axis(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one number per learnt axis, shaped to broadcast with positions: (A, 1, 1, ...)."""
    # Filled on the device: a copy from the host would wait for the device, and cannot be part of a
    # CUDA graph.
    filled = [torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(filled).reshape(-1, *[1] * (like.dim() - 1))


def clamped(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp `value` to [low, high], with the gradient of the identity.

    The gradient of a plain clamp is 0 beyond a limit, so a value would be stuck there.
    """
    fixed = value.detach()
    return fixed.clamp(low, high) + (value - fixed)


def is_sharded(tensor: Tensor) -> bool:
    """True if FSDP2 has sharded the tensor, which makes it a DTensor."""
    return hasattr(tensor, "device_mesh")


def clamp_(tensor: Tensor, low: Sequence[float], high: Sequence[float]) -> None:
    """Clamp `tensor[i]` to [low[i], high[i]], in place. A single limit applies to all."""
    if torch.compiler.is_compiling():
        # An operator that declares that it changes its argument: inductor (torch 2.15) drops plain
        # clamps of a parameter if the model has several layers. The view is flat because inductor
        # may change the memory layout of tensors with four axes, and would then clamp a copy.
        _clamp_in_graph(tensor.flatten(1), list(low), list(high))
    elif len(set(zip(low, high, strict=True))) == 1:
        tensor.clamp_(low[0], high[0])
    elif is_sharded(tensor):  # perhaps along its first axis; the limits are the same on every rank
        lowest = _replicated(per_axis(low, tensor), tensor)
        highest = _replicated(per_axis(high, tensor), tensor)
        tensor.copy_(tensor.maximum(lowest).minimum(highest))
    else:
        for coordinate, lowest_value, highest_value in zip(tensor, low, high, strict=True):
            coordinate.clamp_(lowest_value, highest_value)


def _replicated(tensor: Tensor, sharded: Any) -> Tensor:
    """Wrap a tensor that is the same on all ranks, for operations with a sharded tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = sharded.device_mesh
    placements = [Replicate() for _ in range(mesh.ndim)]
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


@torch.library.custom_op("dcls_convert::clamp_", mutates_args=("tensor",))
def _clamp_in_graph(tensor: Tensor, low: list[float], high: list[float]) -> None:
    clamp_(tensor, low, high)
