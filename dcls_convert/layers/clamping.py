"""Clamping of a parameter in place, also in compiled programs and under FSDP2."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .bilinear import per_axis


def clamp_(tensor: Tensor, low: Sequence[float], high: Sequence[float]) -> None:
    """Bring `tensor[i]` into [low[i], high[i]], in place; one limit alone is for all."""
    if torch.compiler.is_compiling():
        # The operator declares that it changes its argument: inductor (torch 2.15) drops plain
        # clamps of a parameter if the model has several layers. The view is flat because inductor
        # may change the memory layout of tensors with four axes, and would then clamp a copy.
        _clamp_in_graph(tensor.flatten(1), list(low), list(high))
    elif len(set(zip(low, high, strict=True))) == 1:
        tensor.clamp_(low[0], high[0])
    else:
        lowest = per_axis(low, tensor)
        highest = per_axis(high, tensor)
        if hasattr(tensor, "device_mesh"):  # FSDP2; the limits are the same on every rank
            lowest = _replicated(lowest, tensor.device_mesh)
            highest = _replicated(highest, tensor.device_mesh)
        tensor.copy_(tensor.maximum(lowest).minimum(highest))


def _replicated(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor that is the same on all ranks, for operations with tensors that FSDP2 has spread."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate() for _ in range(mesh.ndim)]
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


@torch.library.custom_op("dcls_convert::clamp_", mutates_args=("tensor",))
def _clamp_in_graph(tensor: Tensor, low: list[float], high: list[float]) -> None:
    clamp_(tensor, low, high)
