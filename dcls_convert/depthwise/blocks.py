"""Depthwise convolution in blocks on a GPU: `block_kernels` as a function with gradients.

Axes: N images, C channels, H x W a map, R x S the window, M blocks of all images.

This module needs Triton. The backward pass is made of kernels too; only where its gradients are to
be differentiated again, or come in batches, is it made of torch's operations.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..geometry import Pair
from .block_plan import BlockPlan, WindowPlan
from .case import state_of
from .eager import is_batched
from .launching import current_stream
from .layouts import BLOCK_SIDE


def convolve_by_plan(plan: BlockPlan, maps: Tensor, bias: Tensor | None, *source: Tensor) -> Tensor:
    """Convolve with "same" padding: (N, C, H, W), bias (C) -> (N, C, H', W') of the plan's dtype.

    The source is what the plan's bank is made of. The output is in the input's memory format.
    """
    if is_elsewhere(maps):
        with torch.cuda.device(maps.device):
            return convolve_by_plan(plan, maps, bias, *source)
    if torch.is_grad_enabled():
        return cast(Tensor, _Convolution.apply(plan, maps, bias, *source)[0])
    stream = current_stream(plan.device)
    blocks, bank, _ = plan.pack_with_bank(stream, maps, *source)
    return plan.convolve(stream, blocks, bank, bias)


# Plans for windows, by all that they depend on. Their number is bounded: images of all sizes would
# make many.
_plans: dict[tuple[object, ...], WindowPlan] = {}
MAX_PLANS = 1000


def convolve_window(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    window: Pair,
    stride: Pair,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve (N, C, H, W) with a kernel (C, 1, R, S) of any dtype; see `convolve_by_plan`."""
    has_bias = bias is not None
    if torch.compiler.is_compiling():
        plan = WindowPlan(input, window, stride, dtype, has_bias=has_bias)
        return convolve_by_plan(plan, input, bias, kernel)
    key = (window, stride, dtype, *state_of(input, kernel, None, bias))
    if key not in _plans:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = WindowPlan(input, window, stride, dtype, has_bias=has_bias)
    return convolve_by_plan(_plans[key], input, bias, kernel)


def is_elsewhere(tensor: Tensor) -> bool:
    """True if the tensor is on another GPU than the current one, on which kernels are launched."""
    if tensor.is_cpu or torch.compiler.is_compiling():
        return False
    return tensor.get_device() != torch.cuda.current_device()


class _Convolution(Function):
    """Maps (N, C, H, W), bias (C), the source of a bank -> maps (N, C, H', W').

    What is saved for the backward pass, and is not an input, is an output too: such a tensor keeps
    the graph when it is saved, for gradients of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: BlockPlan, maps: Tensor, bias: Tensor | None, *source: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        stream = current_stream(plan.device)
        blocks, bank, copy = plan.pack_with_bank(stream, maps, *source)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if copy is not None:
            source = (*source[:-1], copy)
        ctx.save_for_backward(blocks, bank, *source)
        return plan.convolve(stream, blocks, bank, bias), blocks, copy

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_blocks: Tensor | None, grad_copy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        blocks, bank, *source = ctx.saved_tensors
        if needs_torch(grad_output, grad_blocks, grad_copy):
            return None, *_backward_by_torch(
                plan, blocks, source, grad_output, grad_blocks, grad_copy
            )
        grad_output = cast(Tensor, grad_output)
        _, wants_maps, wants_bias, *wants_source = ctx.needs_input_grad
        stream = current_stream(plan.device)
        gradients, sums = plan.pack_gradients(stream, grad_output, blocks)
        grad_maps: Tensor | None = None
        grad_bias: Tensor | None = None
        grad_source: Sequence[Tensor | None] = [None] * len(source)
        if wants_maps:
            grad_maps = plan.gradient_of_input(stream, gradients, bank)
        if any(wants_source):
            partial_sums = plan.gradient_of_bank(stream, blocks, gradients)
            grad_bias, *grad_source = plan.gradients_of_source(stream, partial_sums, sums, *source)
        elif wants_bias:
            grad_bias = sums.sum(1)
        if not wants_bias:  # perhaps there is none
            grad_bias = None
        return None, grad_maps, grad_bias, *grad_source


# By torch's operations, which can be differentiated again.


def needs_torch(grad_output: Tensor | None, *grad_saved: Tensor | None) -> bool:
    """True if kernels cannot compute a backward pass.

    Its gradients are to be differentiable, or are computed for a batch of them at once. Or there
    are gradients of saved outputs, as there are when gradients are differentiated; a compiled
    program has zeros for them.
    """
    if torch.compiler.is_compiling():
        return False
    if grad_output is None or torch.is_grad_enabled() or is_batched(grad_output):
        return True
    return any(gradient is not None for gradient in grad_saved)


def _backward_by_torch(
    plan: BlockPlan,
    blocks: Tensor,
    source: Sequence[Tensor],
    grad_output: Tensor | None,
    grad_blocks: Tensor | None,
    grad_copy: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of maps, bias and source."""

    def convolve(blocks: Tensor, *source: Tensor) -> Tensor:
        window = plan.window_by_torch(*source)
        padding = (plan.window[0] // 2, plan.window[1] // 2)
        maps = _maps_of_blocks(blocks, plan)
        with torch.autocast(plan.device.type, enabled=False):
            return F.conv2d(
                maps, window.to(plan.dtype), None, plan.stride, padding, groups=plan.channels
            )

    grad_bias: Tensor | None = None
    grad_source: list[Tensor | None] = [None] * len(source)
    if grad_output is not None:
        found = gradients_by_torch(convolve, (blocks, *source), grad_output.to(plan.dtype))
        grad_blocks = add(found[0], grad_blocks)
        grad_source = list(found[1:])
        if plan.has_bias:
            grad_bias = grad_output.sum((0, 2, 3))
    grad_source[-1] = add(grad_source[-1], grad_copy)
    grad_maps: Tensor | None = None
    if grad_blocks is not None:
        grad_maps = _maps_of_blocks(grad_blocks, plan).to(plan.input_dtype)
    return grad_maps, grad_bias, *grad_source


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Add two gradients; None is 0."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def gradients_by_torch(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*inputs)`, differentiable if gradients are enabled.

    Inputs that need no gradient get None.
    """
    with torch.enable_grad():
        output = function(*inputs)
    learnt = [tensor for tensor in inputs if tensor.requires_grad]
    if not output.requires_grad:  # only the bias is learnt
        return tuple(None for _ in inputs)
    found = torch.autograd.grad(
        output, learnt, grad_output, retain_graph=True, create_graph=torch.is_grad_enabled()
    )
    gradients = dict(zip(map(id, learnt), found, strict=True))
    return tuple(gradients.get(id(tensor)) for tensor in inputs)


def _maps_of_blocks(blocks: Tensor, plan: BlockPlan) -> Tensor:
    """Put blocks (C, M, CELLS) together to maps (N, C, H, W)."""
    rows, columns, block_rows, block_columns, _ = plan.map_sizes
    maps = blocks.reshape(plan.channels, -1, block_rows, block_columns, BLOCK_SIDE, BLOCK_SIDE)
    maps = maps.permute(1, 0, 2, 4, 3, 5)  # (N, C, block rows, SIDE, block columns, SIDE)
    maps = maps.reshape(-1, plan.channels, block_rows * BLOCK_SIDE, block_columns * BLOCK_SIDE)
    return maps.narrow(2, 0, rows).narrow(3, 0, columns)
