"""Depthwise convolution in blocks on a GPU: `block_kernels` as a function with gradients.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton. The backward pass uses these kernels, too. It uses torch's operations if
its gradients must be differentiable, or are batched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..geometry import Pair
from .block_plan import BlockPlan
from .eager import is_batched
from .layouts import BLOCK_SIDE


def convolve_by_plan(
    plan: BlockPlan, maps: Tensor, bias: Tensor | None, weight: Tensor, positions: Tensor
) -> Tensor:
    """Convolve with "same" padding: (N, C, H, W), bias (C) -> (N, C, H', W').

    weight (C, 1, E) and positions (2, C, 1, E) make the kernels; or weight is kernels (C, 1, R, S),
    see `BlockPlan`. The output is in the input's memory format.
    """
    if not plan.is_traced and is_on_another_gpu(maps):
        with torch.cuda.device(maps.device):
            return convolve_by_plan(plan, maps, bias, weight, positions)
    if torch.is_grad_enabled() and (
        maps.requires_grad
        or weight.requires_grad
        or positions.requires_grad
        or (bias is not None and bias.requires_grad)
    ):
        output: Tensor
        output, *_ = _Convolution.apply(plan, maps, bias, weight, positions)
        return output
    return plan.convolve(maps, bias, weight, positions, saves=False)[0]


def convolver_of_windows(
    maps: Tensor, window: Pair, stride: Pair, dtype: torch.dtype, *, has_bias: bool
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:
    """Return the function that convolves maps like these with kernels (C, 1, R, S)."""
    plan = BlockPlan(maps, window, stride, dtype, has_bias=has_bias)
    no_positions = torch.zeros(1, device=maps.device)

    def convolve(maps: Tensor, bias: Tensor | None, kernel: Tensor) -> Tensor:
        return convolve_by_plan(plan, maps, bias, kernel, no_positions)

    return convolve


def is_on_another_gpu(tensor: Tensor) -> bool:
    """True if the tensor is not on the current GPU, on which kernels are launched."""
    return not tensor.is_cpu and tensor.get_device() != torch.cuda.current_device()


class _Convolution(Function):
    """Maps (N, C, H, W), bias (C), weight (C, 1, E), positions (2, C, 1, E) -> (N, C, H', W').

    The saved tensor is also an output, so that second derivatives flow through its blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: BlockPlan,
        maps: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output, *saved = plan.convolve(maps, bias, weight, positions, saves=True)
        ctx.plan = plan
        if not plan.is_traced:
            # Not by save_for_backward: it would refuse positions that were clamped in place later.
            ctx.positions = positions
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *saved)
        return output, saved[0]

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        weight, *saved = ctx.saved_tensors
        _, of_maps, of_bias, of_weight, of_positions = ctx.needs_input_grad
        if needs_torch(grad_output, grad_saved):
            return None, *_backward_by_torch(
                plan, weight, ctx.positions, saved[0], grad_output, grad_saved
            )
        if grad_output is None:
            return None, None, None, None, None
        of_kernel = of_weight or of_positions
        grad_maps = grad_bias = grad_weight = grad_positions = None
        if of_maps or of_kernel:
            found = plan.gradients(grad_output, weight, saved, of_maps=of_maps, of_kernel=of_kernel)
            if of_kernel:
                *found, grad_bias, grad_weight, grad_positions = found
            if of_maps:
                (grad_maps,) = found
        if not of_bias:  # there may be no bias
            grad_bias = None
        elif not of_kernel:
            grad_bias = grad_output.sum((0, 2, 3), dtype=torch.float32)
        return None, grad_maps, grad_bias, grad_weight, grad_positions


def _backward_by_torch(
    plan: BlockPlan,
    weight: Tensor,
    positions: Tensor,
    saved: Tensor,
    grad_output: Tensor | None,
    grad_saved: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of maps, bias, weight and positions."""

    def convolve(blocks: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        window = plan.window_by_torch(weight, positions).to(plan.dtype)
        padding = (plan.window[0] // 2, plan.window[1] // 2)
        maps = _maps_of_blocks(blocks, plan)
        with torch.autocast(plan.device.type, enabled=False):
            return F.conv2d(maps, window, None, plan.stride, padding, groups=plan.channels)

    grad_bias: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_positions: Tensor | None = None
    grad_blocks: Tensor | None = None
    if grad_saved is not None:
        grad_blocks = plan.saved.part_of(grad_saved, "blocks")
    if grad_output is not None:
        with torch.enable_grad():
            blocks = plan.saved.part_of(saved, "blocks")
            # Positions with the values of the forward pass, and the graph of the present tensor.
            clamped = plan.saved.part_of(saved.detach(), "clamped")
            clamped = positions + (clamped - positions).detach()
        found = gradients_by_torch(convolve, (blocks, weight, clamped), grad_output.to(plan.dtype))
        grad_blocks = add_gradients(found[0], grad_blocks)
        grad_weight, grad_positions = found[1:]
        if plan.has_bias:
            grad_bias = grad_output.sum((0, 2, 3))
    grad_maps: Tensor | None = None
    if grad_blocks is not None:
        grad_maps = _maps_of_blocks(grad_blocks, plan).to(plan.input.dtype)
    return grad_maps, grad_bias, grad_weight, grad_positions


def _maps_of_blocks(blocks: Tensor, plan: BlockPlan) -> Tensor:
    """Put blocks (C, M, CELLS) together to maps (N, C, H, W)."""
    rows, columns, block_rows, block_columns, _ = plan.map_sizes
    maps = blocks.reshape(plan.channels, -1, block_rows, block_columns, BLOCK_SIDE, BLOCK_SIDE)
    maps = maps.permute(1, 0, 2, 4, 3, 5)  # (N, C, block rows, SIDE, block columns, SIDE)
    maps = maps.reshape(-1, plan.channels, block_rows * BLOCK_SIDE, block_columns * BLOCK_SIDE)
    return maps.narrow(2, 0, rows).narrow(3, 0, columns)


def needs_torch(grad_output: Tensor | None, grad_saved: Tensor | None) -> bool:
    """True if Triton kernels cannot compute a backward pass.

    This is so if gradients must be differentiable or are batched, or if the saved output has a
    gradient, as when gradients are differentiated.
    """
    if torch.compiler.is_compiling():
        return False
    if grad_output is None or grad_saved is not None:
        return True
    return torch.is_grad_enabled() or is_batched(grad_output)


def gradients_by_torch(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*inputs)`, differentiable if gradients are enabled.

    Inputs that need no gradient, or are not used, get None.
    """
    with torch.enable_grad():
        output = function(*inputs)
    if not output.requires_grad:  # only the bias is learnt
        return tuple(None for _ in inputs)
    found = torch.autograd.grad(
        output,
        [tensor for tensor in inputs if tensor.requires_grad],
        grad_output,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    gradients = iter(found)
    return tuple(next(gradients) if tensor.requires_grad else None for tensor in inputs)


def add_gradients(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two gradients; None is 0."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
