"""Clamping positions in place, in a way that compilers keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .bilinear import per_axis


def clamp_(tensor: Tensor, low: Sequence[float], high: Sequence[float]) -> None:
    """Bring `tensor[i]` into [low[i], high[i]], in place; one limit alone is for all.

    In a compiled graph, an operator of our own does it: inductor drops a plain in-place clamp of a parameter where the
    model has several layers, and keeps operators that declare that they change their argument. The operator gets a
    flat view: where inductor lays out convolutions as channels_last, it clamps a copy of a tensor of four axes (both
    seen with torch 2.15).
    """
    if torch.compiler.is_compiling():
        _clamp_in_graph(tensor.flatten(1), list(low), list(high))
    elif len(set(zip(low, high, strict=True))) == 1:
        tensor.clamp_(low[0], high[0])
    else:
        # On the whole tensor at once: FSDP2 may have spread its first axis over ranks.
        limits = (per_axis(side, tensor) for side in (low, high))
        least, most = (_spread_like(limit, tensor) for limit in limits)
        tensor.copy_(tensor.maximum(least).minimum(most))


@torch.library.custom_op("dcls_convert::clamp_", mutates_args=("tensor",))
def _clamp_in_graph(tensor: Tensor, low: list[float], high: list[float]) -> None:
    clamp_(tensor, low, high)


@_clamp_in_graph.register_fake
def _(tensor: Tensor, low: list[float], high: list[float]) -> None:
    return None


def _spread_like(limit: Tensor, tensor: Tensor) -> Tensor:
    """`limit`, which is the same on all ranks, for operations with what FSDP2 may have spread over them."""
    if not hasattr(tensor, "device_mesh"):
        return limit
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    replicated: Tensor = DTensor.from_local(limit, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated
