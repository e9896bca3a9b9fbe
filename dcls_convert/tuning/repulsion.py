"""The repulsive loss: elements of one kernel that are nearer than a cell push each other apart.

Axes: A learnt axes, *C kernels (output channel, input channel, cell of a dense axis), E elements of
one kernel.
Source: paper (arXiv:2112.03740), section 3 "Repulsive loss"; the authors' ConvNeXt training code.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..depthwise.eager import is_eager
from ..layers.position_statistics import pairs
from ..networks.positions import position_parameters, whole

REACH = 1.0  # cells; elements that far apart or farther do not repel each other
MOST_DISTANCES = 1 << 20  # held at once: 4 MiB in float32, and a few tensors of that size


def repulsive_loss(model: nn.Module) -> Tensor:
    """How far the elements of a kernel overlap, from 0 to 1; its *square* is what the paper's
    authors add to the loss:

        loss = criterion(model(images), labels) + tuning.repulsive_loss(model) ** 2

    They do so from epoch 21 on. For each positions tensor, 2 / (m (m - 1) kernels) * sum over
    kernels and pairs i < j of relu(1 - |p_i - p_j|), with m elements in a kernel and distances in
    cells; then the mean over all positions tensors, tied ones once. Kernels are out_channels *
    in_channels / groups, times the cells of dense axes.

    Memory stays bounded, in an ordinary backward too: no tensor is larger than the positions or a
    few MiB. Elements at exactly one place do not push each other, since no direction is given.

    Returns:
        A scalar on the first positions' device; 0, without a gradient, where the model has no DCLS
        layers. Under FSDP2 all ranks must call it.
    """
    positions = [one.tensor for one in position_parameters(model, "positions")]
    if not positions:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    losses = [repulsion(whole(tensor)) for tensor in positions]
    return torch.stack([loss.to(losses[0]) for loss in losses]).mean()


def repulsion(positions: Tensor) -> Tensor:
    """The loss of one tensor, (A, *C, E); in float32 where positions are narrower, and 0 for
    kernels of one element."""
    axes, count = positions.shape[0], positions.shape[-1]
    # A copy: layers clamp their positions in place, also between this and the backward.
    exact = positions.to(torch.promote_types(positions.dtype, torch.float32), copy=True)
    kernels = exact.reshape(axes, -1, count)  # (A, C, E)
    total: Tensor = _Total.apply(kernels) if is_eager(kernels) else _total(kernels)
    return total / max(count * (count - 1) * kernels.shape[1], 1)


class _Total(Function):
    """`_total`, whose gradient is computed along with the value: no distances are kept for
    backward."""

    @staticmethod
    def forward(ctx: Any, kernels: Tensor) -> Tensor:
        gradient = torch.empty_like(kernels) if ctx.needs_input_grad[0] else None
        total = _total(kernels, gradient)
        ctx.save_for_backward(kernels, gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        kernels, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # A graph of the gradient is wanted (create_graph=True).
            (gradient,) = torch.autograd.grad(_total(kernels), kernels, create_graph=True)
        return cast(Tensor, gradient * upstream)


def _total(kernels: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Sum of relu(1 - distance) over ordered pairs; fills in its gradient. Kernels and gradient are
    (A, C, E)."""
    total = kernels.new_zeros(())
    for part, differences, squares in pairs(kernels, MOST_DISTANCES):
        together = squares == 0  # so is an element with itself, which does not count
        distances = squares.masked_fill_(
            together, REACH**2
        ).sqrt()  # the root has no derivative at 0
        pushes = (REACH - distances).relu_()
        total = total + pushes.sum() + REACH * (together.sum() - kernels[0][part].numel())
        if gradient is not None:
            slopes = pushes.sign().div_(distances)
            for axis, difference in enumerate(differences):
                # Each pair counts twice, and moves its first element both times.
                gradient[axis][part] = -2 * difference.mul_(slopes).sum(-1)
    return total
