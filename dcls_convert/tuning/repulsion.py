"""The repulsive loss: elements of one kernel that are nearer than a cell push each other apart.

Axes: A learnt axes, *C kernels (output channel, input channel, cell of a dense axis), E elements of one kernel.
Source: paper (arXiv:2112.03740), section 3 "Repulsive loss"; the authors' ConvNeXt training code.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers.eager import is_eager
from ..layers.positions import position_parameters, whole

REACH = 1.0  # cells; elements that far apart or farther do not repel each other
MOST_DISTANCES = 1 << 20  # held at once: 4 MiB in float32, and a few tensors of that size


def repulsive_loss(model: nn.Module) -> Tensor:
    """How far the elements of a kernel overlap, from 0 to 1; its *square* is what the paper's authors add to the loss:

        loss = criterion(model(images), labels) + tuning.repulsive_loss(model) ** 2

    They do so from epoch 21 on. For each positions tensor, 2 / (m (m - 1) kernels) * sum over kernels and pairs i < j
    of relu(1 - |p_i - p_j|), with m elements in a kernel and distances in cells; then the mean over all positions
    tensors, tied ones once. Kernels are out_channels * in_channels / groups, times the cells of dense axes.

    Memory stays bounded, in backward too: no tensor is larger than the positions or a few MiB. Elements at exactly
    one place do not push each other, since no direction is given.

    Returns:
        A scalar on the first positions' device; 0, without a gradient, where the model has no DCLS layers. Under FSDP2
        all ranks must call it.
    """
    positions = [one.tensor for one in position_parameters(model) if one.kind == "positions"]
    if not positions:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    losses = [repulsion(whole(tensor)) for tensor in positions]
    return torch.stack([loss.to(losses[0]) for loss in losses]).mean()


def repulsion(positions: Tensor, most_distances: int = MOST_DISTANCES) -> Tensor:
    """Mean over all pairs of elements of a kernel, and over all kernels, of relu(1 - distance in cells).

    Args:
        positions: (A, *C, E), in cells. Each cell of a dense axis is a kernel by itself.
        most_distances: Bounds the memory: as many distances between elements are held at once.

    Returns:
        A scalar from 0 (no two elements of a kernel nearer than one cell) to 1 (all at one place); 0 for kernels of one
        element. In float32 where positions are narrower.

    Elements at one place get no gradient from each other: the distance has none there.
    """
    axes, count = positions.shape[0], positions.shape[-1]
    exact = positions.to(torch.promote_types(positions.dtype, torch.float32))
    kernels = exact.reshape(axes, -1, count)  # (A, C, E)
    at_once, rows = max(1, most_distances // max(count * count, 1)), max(1, most_distances // max(count, 1))
    total = exact.new_zeros(())
    for chunk in torch.split(kernels, at_once, 1):
        for first in range(0, count, rows):
            if is_eager(chunk):  # the distances are computed again in backward, and none are kept until then
                total = total + checkpoint(_chunk, chunk, first, rows, use_reentrant=False, preserve_rng_state=False)
            else:
                total = total + _chunk(chunk, first, rows)
    return total / max(count * (count - 1) * kernels.shape[1], 1)


def _chunk(kernels: Tensor, first: int, rows: int) -> Tensor:
    """Sum of relu(1 - distance) over ordered pairs, the first element among `rows` from `first`; kernels (A, C, E)."""
    differences = (one[:, first : first + rows, None] - one[:, None, :] for one in kernels)  # (C, rows, E) each
    squares = sum((difference.square() for difference in differences), start=kernels.new_zeros(()))
    itself = torch.arange(kernels.shape[-1], device=kernels.device)
    others = itself[first : first + rows, None] != itself  # (rows, E)
    apart = squares != 0  # also where not a number, which must show in the loss
    distances = squares.where(apart, REACH**2).sqrt()  # the root has no derivative at 0
    return ((REACH - distances).relu() + REACH * ~apart).mul(others).sum()
