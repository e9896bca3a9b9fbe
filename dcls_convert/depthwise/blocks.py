"""Depthwise convolution in blocks on a GPU: `block_kernels` as a function with gradients.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton. The backward pass uses these kernels, too. It uses torch's operations if
its gradients must be differentiable, or are batched.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .block_plan import BlockPlan
from .eager import is_batched
from .layouts import BLOCK_SIDE


def convolve_by_plan(plan: BlockPlan, maps: Tensor, bias: Tensor | None, *kernel: Tensor) -> Tensor:
    """Convolve with "same" padding: (N, C, H, W), bias (C) -> (N, C, H', W').

    `kernel` is what the plan's bank is made of. The output is in the input's memory format.
    """
    if is_on_another_gpu(maps):
        with torch.cuda.device(maps.device):
            return convolve_by_plan(plan, maps, bias, *kernel)
    tensors = [tensor for tensor in (maps, bias, *kernel) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return cast(Tensor, _Convolution.apply(plan, maps, bias, *kernel)[0])
    blocks, bank, _ = plan.pack_with_bank(maps, *kernel)
    return plan.convolve(blocks, bank, bias)


def is_on_another_gpu(tensor: Tensor) -> bool:
    """True if the tensor is not on the current GPU, on which kernels are launched."""
    if tensor.is_cpu or torch.compiler.is_compiling():
        return False
    return tensor.get_device() != torch.cuda.current_device()


class _Convolution(Function):
    """Maps (N, C, H, W), bias (C), kernel (see `BlockPlan`) -> maps (N, C, H', W').

    Blocks and clamped positions are outputs too, so that gradients of gradients flow through them.
    The bank is only for the backward pass by kernels.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: BlockPlan, maps: Tensor, bias: Tensor | None, *kernel: Tensor
    ) -> tuple[Tensor, ...]:
        blocks, bank, clamped = plan.pack_with_bank(maps, *kernel)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if clamped is not None:
            kernel = (*kernel[:-1], clamped)
        ctx.save_for_backward(blocks, bank, *kernel)
        output = plan.convolve(blocks, bank, bias)
        if clamped is None:  # dynamo cannot trace an output that is None
            return output, blocks
        return output, blocks, clamped

    @staticmethod
    def backward(
        ctx: Any,
        grad_output: Tensor | None,
        grad_blocks: Tensor | None,
        grad_clamped: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        blocks, bank, *kernel = ctx.saved_tensors
        if needs_torch(grad_output, grad_blocks, grad_clamped):
            return None, *_backward_by_torch(
                plan, blocks, kernel, grad_output, grad_blocks, grad_clamped
            )
        grad_output = cast(Tensor, grad_output)
        _, wants_maps, wants_bias, *wants_kernel = ctx.needs_input_grad
        gradients, sums = plan.pack_gradients(grad_output, blocks)
        grad_maps: Tensor | None = None
        grad_bias: Tensor | None = None
        grad_kernel: Sequence[Tensor | None] = [None] * len(kernel)
        if wants_maps:
            grad_maps = plan.gradient_of_input(gradients, bank)
        if any(wants_kernel):
            partial_sums = plan.gradient_of_bank(blocks, gradients)
            grad_bias, *grad_kernel = plan.gradients_of_kernel(partial_sums, sums, *kernel)
        elif wants_bias:
            grad_bias = sums.sum(1)
        if not wants_bias:  # perhaps there is none
            grad_bias = None
        return None, grad_maps, grad_bias, *grad_kernel


def _backward_by_torch(
    plan: BlockPlan,
    blocks: Tensor,
    kernel: Sequence[Tensor],
    grad_output: Tensor | None,
    grad_blocks: Tensor | None,
    grad_clamped: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of maps, bias and kernel."""

    def convolve(blocks: Tensor, *kernel: Tensor) -> Tensor:
        window = plan.window_by_torch(*kernel)
        padding = (plan.window[0] // 2, plan.window[1] // 2)
        maps = _maps_of_blocks(blocks, plan)
        with torch.autocast(plan.device.type, enabled=False):
            return F.conv2d(
                maps, window.to(plan.dtype), None, plan.stride, padding, groups=plan.channels
            )

    grad_bias: Tensor | None = None
    grad_kernel: list[Tensor | None] = [None] * len(kernel)
    if grad_output is not None:
        found = gradients_by_torch(convolve, (blocks, *kernel), grad_output.to(plan.dtype))
        grad_blocks = add(found[0], grad_blocks)
        grad_kernel = list(found[1:])
        if plan.has_bias:
            grad_bias = grad_output.sum((0, 2, 3))
    grad_kernel[-1] = add(grad_kernel[-1], grad_clamped)
    grad_maps: Tensor | None = None
    if grad_blocks is not None:
        grad_maps = _maps_of_blocks(grad_blocks, plan).to(plan.input_dtype)
    return grad_maps, grad_bias, *grad_kernel


def _maps_of_blocks(blocks: Tensor, plan: BlockPlan) -> Tensor:
    """Put blocks (C, M, CELLS) together to maps (N, C, H, W)."""
    rows, columns, block_rows, block_columns, _ = plan.map_sizes
    maps = blocks.reshape(plan.channels, -1, block_rows, block_columns, BLOCK_SIDE, BLOCK_SIDE)
    maps = maps.permute(1, 0, 2, 4, 3, 5)  # (N, C, block rows, SIDE, block columns, SIDE)
    maps = maps.reshape(-1, plan.channels, block_rows * BLOCK_SIDE, block_columns * BLOCK_SIDE)
    return maps.narrow(2, 0, rows).narrow(3, 0, columns)


def needs_torch(grad_output: Tensor | None, *grad_saved: Tensor | None) -> bool:
    """True if kernels cannot compute a backward pass.

    Then its gradients must be differentiable, or are batched, or there are gradients of saved
    outputs, as when gradients are differentiated. (A compiled program has zeros for the latter.)
    """
    if torch.compiler.is_compiling():
        return False
    if grad_output is None or torch.is_grad_enabled() or is_batched(grad_output):
        return True
    return any(gradient is not None for gradient in grad_saved)


def gradients_by_torch(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*inputs)`, differentiable if gradients are enabled.

    Inputs that need no gradient get None.
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
    )
    gradients = iter(found)
    return tuple(next(gradients) if tensor.requires_grad else None for tensor in inputs)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two gradients; None is 0."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
