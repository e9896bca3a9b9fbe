"""The repulsive loss pushes apart elements of one kernel that are closer than one cell.

Axes: A learnt axes, *C kernels (output channel, input channel, cell of a dense axis), E elements of
one kernel.
Source: paper (arXiv:2112.03740), section 3 "Repulsive loss"; the authors' ConvNeXt training code.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..depthwise.eager import is_eager
from ..errors import check_argument
from ..layers.position_parameters import position_parameters
from ..layers.ties import is_sharded

REACH = 1.0  # cells; elements at this distance or farther do not repel each other
# Block size: 4 MiB in float32; a few tensors have this size. One kernel may have more.
DIFFERENCES_PER_BLOCK = 1 << 20


def repulsive_loss(model: nn.Module) -> Tensor:
    """Return how much the elements of kernels overlap: from 0, not at all, to 1, completely.

    The paper's authors add its *square* to the loss, from epoch 21 on:

        loss = criterion(model(images), labels) + tuning.repulsive_loss(model) ** 2

    For one positions tensor, the loss is

        2 / (m (m - 1) kernels) * sum over kernels and pairs i < j of relu(1 - |p_i - p_j|)

    with m elements per kernel and distances in cells. The number of kernels is out_channels *
    in_channels / groups, times the number of cells of the dense axes. The loss of the model is the
    mean over all positions tensors; a tensor that tied layers share counts once.

    Memory is bounded: with up to 1,000 elements per kernel, no tensor is larger than the positions
    or a few MiB, also in an ordinary backward pass (without `create_graph=True`). Elements at
    exactly the same position do not push each other apart, since there is no direction to push in.

    Returns:
        A scalar on the first positions' device; 0, without a gradient, if the model has no DCLS
        layers. Under FSDP2 all ranks must call it.

    Raises:
        DclsConvertError: FSDP1 has flattened the positions.
    """
    check_argument("model", model, nn.Module)
    losses: list[Tensor] = []
    for parameter in position_parameters(model, "positions"):
        positions: Any = parameter.tensor
        if is_sharded(positions):
            positions = positions.full_tensor()
        loss = repulsion(positions)
        if losses:
            loss = loss.to(losses[0])  # models may be spread over devices
        losses.append(loss)
    if losses:
        return torch.stack(losses).mean()
    any_parameter = next(model.parameters(), None)
    if any_parameter is None:
        return torch.zeros(())
    return torch.zeros((), device=any_parameter.device)


def repulsion(positions: Tensor) -> Tensor:
    """Return the loss of one positions tensor (A, *C, E); 0 for kernels of one element.

    It is computed in at least float32.
    """
    axes = positions.shape[0]
    count = positions.shape[-1]
    # A copy, since layers may clamp their positions in place before the backward pass.
    exact = positions.to(torch.promote_types(positions.dtype, torch.float32), copy=True)
    kernels = exact.reshape(axes, -1, count)  # (A, C, E)
    blocks = torch.split(kernels, max(1, DIFFERENCES_PER_BLOCK // (axes * count**2)), 1)
    if is_eager(kernels):
        # Distances are computed again for backward, so they are not stored.
        totals = [
            checkpoint(_total, block, use_reentrant=False, preserve_rng_state=False)
            for block in blocks
        ]
    else:
        totals = [_total(block) for block in blocks]
    ordered_pairs = count * (count - 1) * kernels.shape[1]
    return torch.stack(totals).sum() / max(ordered_pairs, 1)


def _total(kernels: Tensor) -> Tensor:
    """Sum relu(1 - distance) over the ordered pairs of elements of kernels (A, C, E), to a scalar.

    Two elements at the same position overlap fully; an element does not count with itself.
    """
    # Not by torch.cdist, which is inexact with matrix products, and slow without them.
    differences = kernels[..., :, None] - kernels[..., None, :]  # (A, C, E, E)
    squared_distances = differences.square().sum(0)
    coincident = squared_distances == 0
    # The square root has no derivative at 0. Setting the distance to REACH removes the pair.
    distances = torch.where(coincident, REACH**2, squared_distances).sqrt()
    overlaps = (REACH - distances).relu()
    return overlaps.sum() + REACH * (coincident.sum() - kernels[0].numel())
