"""Depthwise convolution in blocks on a GPU: `block_kernels` as a function with gradients.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton. The backward pass is made of kernels too; only where its gradients are to
be differentiated again, or come in batches, is it made of torch's operations.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..geometry import Pair
from .block_plan import BlockPlan, find_block_plan
from .eager import is_batched
from .layouts import BLOCK_SIDE


def depthwise_by_blocks(
    input: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, dtype: torch.dtype
) -> Tensor:
    """Convolve with "same" padding: (N, C, H, W), kernel (C, 1, R, S), bias (C) -> maps of `dtype`.

    The output is in the input's memory format.
    """
    plan = find_block_plan(input, (kernel.shape[2], kernel.shape[3]), stride, dtype)
    with on_device_of(input):
        blocks = Pack.apply(input, plan)
        return cast(Tensor, _Convolution.apply(blocks, kernel, bias, plan))


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one inside a `with` block: kernels are launched there."""
    if tensor.is_cpu or torch.compiler.is_compiling():
        return nullcontext()
    if tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


class Pack(Function):
    """Maps (N, C, H, W) -> blocks (C, M, CELLS)."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, plan: BlockPlan) -> Tensor:
        ctx.plan = plan
        ctx.dtype = maps.dtype
        return plan.pack(maps)

    @staticmethod
    def backward(ctx: Any, grad_blocks: Tensor) -> tuple[Tensor, None]:
        plan: BlockPlan = ctx.plan
        if needs_torch(grad_blocks):
            return maps_of_blocks(grad_blocks, plan).to(ctx.dtype), None
        return plan.unpack(grad_blocks.contiguous(), plan.input_shape, ctx.dtype), None


class _Convolution(Function):
    """Blocks (C, M, CELLS), window (C, 1, R, S), bias (C) -> maps (N, C, H', W')."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Tensor, window: Tensor, bias: Tensor | None, plan: BlockPlan
    ) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(blocks, window)
        return convolve_to_maps(plan, blocks, plan.bank_of_window(window), bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        blocks, window = ctx.saved_tensors
        if needs_torch(grad_output):
            convolve = partial(convolve_by_torch, plan=plan)
            found = gradients_by_torch(convolve, (blocks, window), grad_output)
            return *found, grad_output.sum((0, 2, 3)), None
        grad_blocks = None
        grad_window = None
        grad_bias = None
        gradients = plan.pack(grad_output, plan.stride)
        if ctx.needs_input_grad[0]:
            grad_blocks = plan.convolve(gradients, plan.bank_of_window(window), turned=True)
        if ctx.needs_input_grad[1]:
            partial_sums = plan.gradient_of_bank(blocks, gradients)
            grad_window = plan.gradient_of_window(partial_sums, window.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = gradient_of_bias(gradients)
        return grad_blocks, grad_window, grad_bias, None


def convolve_to_maps(plan: BlockPlan, blocks: Tensor, bank: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve blocks, and copy every output that the stride keeps into maps."""
    outputs = plan.convolve(blocks, bank, bias)
    return plan.unpack(outputs, plan.output_shape, plan.dtype, plan.stride)


def gradient_of_bias(gradients: Tensor) -> Tensor:
    """Sum gradients in blocks (C, M, CELLS) to that of the bias (C)."""
    return gradients.sum((1, 2), dtype=torch.float32)


# By torch's operations, which can be differentiated again.


def needs_torch(grad_output: Tensor) -> bool:
    """True if gradients are to be differentiable, or are computed for a batch of them at once."""
    return not torch.compiler.is_compiling() and (
        torch.is_grad_enabled() or is_batched(grad_output)
    )


def gradients_by_torch(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*inputs)`, differentiable if gradients are enabled.

    Inputs that need no gradient get None.
    """
    with torch.enable_grad():
        output = function(*inputs)
    learnt = [tensor for tensor in inputs if tensor.requires_grad]
    if not learnt:  # only the bias is learnt
        return tuple(None for _ in inputs)
    found = torch.autograd.grad(
        output, learnt, grad_output, retain_graph=True, create_graph=torch.is_grad_enabled()
    )
    gradients = dict(zip(map(id, learnt), found, strict=True))
    return tuple(gradients.get(id(tensor)) for tensor in inputs)


def maps_of_blocks(blocks: Tensor, plan: BlockPlan) -> Tensor:
    """Put blocks (C, M, CELLS) together to maps (N, C, H, W)."""
    rows, columns, block_rows, block_columns, _ = plan.map_sizes
    maps = blocks.reshape(plan.channels, -1, block_rows, block_columns, BLOCK_SIDE, BLOCK_SIDE)
    maps = maps.permute(1, 0, 2, 4, 3, 5)  # (N, C, block rows, SIDE, block columns, SIDE)
    maps = maps.reshape(-1, plan.channels, block_rows * BLOCK_SIDE, block_columns * BLOCK_SIDE)
    return maps.narrow(2, 0, rows).narrow(3, 0, columns)


def convolve_by_torch(blocks: Tensor, window: Tensor, *, plan: BlockPlan) -> Tensor:
    """Convolve blocks to maps, as `convolve_to_maps` does; without a bias."""
    padding = (plan.window[0] // 2, plan.window[1] // 2)
    with torch.autocast(plan.device.type, enabled=False):
        return F.conv2d(
            maps_of_blocks(blocks, plan),
            window.to(plan.dtype),
            None,
            plan.stride,
            padding,
            groups=plan.channels,
        )
