"""Bilinear elements of 2-D kernels on a GPU: each step is one launch of `element_kernels`.

- `construct_windows` makes kernels of any convolution.
- `convolve_elements` convolves depthwise in blocks. It never makes windows: the bank is made from
  the elements, and their gradients from the bank's.

Layers clamp their positions in place in every forward pass, so positions must not be saved for
backward. The kernels write clamped copies, which the functions here return as a second output: an
output that is saved keeps the graph, for gradients of gradients.

Axes: *C kernels, E elements, R x S the window. This module needs Triton.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..depthwise.block_plan import BlockPlan, find_block_plan, next_power_of_2
from ..depthwise.blocks import (
    Pack,
    convolve_by_torch,
    convolve_to_maps,
    gradient_of_bias,
    gradients_by_torch,
    needs_torch,
    on_device_of,
)
from ..depthwise.launching import Launch, Launches
from ..geometry import Pair, ceil_div
from . import element_kernels as kernels
from .bilinear_plain import construct_by_broadcasting
from .clamp_tensors import per_axis

_WINDOW_CELLS: int = kernels.WINDOW_CELLS.value
_ELEMENTS: int = kernels.ELEMENTS.value
_ELEMENTS_OF_BANK: int = kernels.ELEMENTS_OF_BANK.value

_launches = Launches()


def construct_windows(weight: Tensor, positions: Tensor, size: Pair) -> Tensor:
    """Construct kernels: weight (*C, E), positions (2, *C, E) -> (*C, R, S), of weight's dtype.

    Positions are in cells from the centre. The sides of the window must be longer than one cell.
    """
    with on_device_of(weight):
        windows, _ = _Construction.apply(weight, positions, size)
    return cast(Tensor, windows)


def convolve_elements(
    input: Tensor,
    weight: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    size: Pair,
    stride: Pair,
    dtype: torch.dtype,
) -> Tensor:
    """Convolve maps (N, C, H, W) with elements (C, 1, E); see `depthwise_by_blocks`."""
    plan = find_block_plan(input, size, stride, dtype)
    with on_device_of(input):
        blocks = Pack.apply(input, plan)
        maps, _ = _Convolution.apply(blocks, weight, positions, bias, plan)
    return cast(Tensor, maps)


class _Construction(Function):
    """weight (*C, E), positions (2, *C, E) -> windows (*C, R, S), clamped positions."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
        ctx.size = size
        ctx.set_materialize_grads(False)
        weight = weight.contiguous()
        positions = positions.contiguous()
        windows = torch.empty((*weight.shape[:-1], *size), dtype=weight.dtype, device=weight.device)
        clamped = torch.empty_like(positions)
        elements = weight.shape[-1]
        count = weight.numel() // elements
        key = ("construct", count, elements, size, weight.dtype, positions.dtype, weight.device)
        launch = _launches.find(key)
        if launch is None:
            launch = _launches.keep(key, _construct_launch(count, elements, size))
        launch(weight, positions, windows, clamped)
        ctx.save_for_backward(weight, clamped)
        return windows, clamped

    @staticmethod
    def backward(
        ctx: Any, grad_windows: Tensor | None, grad_clamped: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_windows is None:
            return None, grad_clamped, None
        weight, clamped = ctx.saved_tensors
        size = ctx.size
        grad_weight: Tensor | None
        grad_positions: Tensor | None
        if needs_torch(grad_windows):
            construct = partial(construct_by_torch, size=size)
            grad_weight, grad_positions = gradients_by_torch(
                construct, (weight, clamped), grad_windows
            )
        else:
            grad_weight = torch.empty_like(weight)
            grad_positions = torch.empty_like(clamped)
            elements = weight.shape[-1]
            count = weight.numel() // elements
            dtypes = (weight.dtype, clamped.dtype, grad_windows.dtype)
            key = ("gradients", count, elements, size, dtypes, weight.device)
            launch = _launches.find(key)
            if launch is None:
                grid = (ceil_div(weight.numel(), _ELEMENTS), 1, 1)
                new = Launch(kernels.gradients_of_elements, grid, (count, elements), size)
                launch = _launches.keep(key, new)
            launch(weight, clamped, grad_windows.contiguous(), grad_weight, grad_positions)
        return grad_weight, _sum(grad_positions, grad_clamped), None


def _construct_launch(count: int, elements: int, size: Pair) -> Launch:
    cells = next_power_of_2(size[0] * size[1])
    at_once = max(1, _WINDOW_CELLS // cells)
    return Launch(
        kernels.construct,
        (ceil_div(count, at_once), 1, 1),
        (count, elements),
        (*size, cells, at_once),
    )


class _Convolution(Function):
    """Blocks (C, M, CELLS), elements (C, 1, E), bias (C) -> maps, clamped positions."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Tensor,
        weight: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        plan: BlockPlan,
    ) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        weight = weight.contiguous()
        positions = positions.contiguous()
        clamped = torch.empty_like(positions)
        bank = _bank(plan, weight, positions, clamped)
        ctx.save_for_backward(blocks, weight, clamped)
        return convolve_to_maps(plan, blocks, bank, bias), clamped

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_clamped: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, None, grad_clamped, None, None
        plan: BlockPlan = ctx.plan
        blocks, weight, clamped = ctx.saved_tensors
        grad_blocks: Tensor | None = None
        grad_weight: Tensor | None = None
        grad_positions: Tensor | None = None
        grad_bias: Tensor | None = None
        if needs_torch(grad_output):
            convolve = partial(convolve_elements_by_torch, plan=plan)
            grad_blocks, grad_weight, grad_positions = gradients_by_torch(
                convolve, (blocks, weight, clamped), grad_output
            )
            grad_bias = grad_output.sum((0, 2, 3))
        else:
            gradients = plan.pack(grad_output, plan.stride)
            if ctx.needs_input_grad[0]:
                bank = _bank(plan, weight, clamped, torch.empty_like(clamped))
                grad_blocks = plan.convolve(gradients, bank, turned=True)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                partial_sums = plan.gradient_of_bank(blocks, gradients)
                grad_weight, grad_positions = _gradients(plan, weight, clamped, partial_sums)
            if ctx.needs_input_grad[3]:
                grad_bias = gradient_of_bias(gradients)
        return grad_blocks, grad_weight, _sum(grad_positions, grad_clamped), grad_bias, None


def _bank(plan: BlockPlan, weight: Tensor, positions: Tensor, clamped: Tensor) -> Tensor:
    """Make the bank from elements (C, 1, E), and write their clamped positions."""
    bank = plan.new_bank()
    elements = weight.shape[-1]
    key = ("bank_of_elements", elements, weight.dtype, positions.dtype)
    launch = plan.launches.find(key)
    if launch is None:
        new = Launch(
            kernels.bank_of_elements,
            (plan.taps, plan.channels, 1),
            (plan.channels, elements, *plan.tap_sizes),
            plan.window,
        )
        launch = plan.launches.keep(key, new)
    launch(weight, positions, bank, clamped)
    return bank


def _gradients(
    plan: BlockPlan, weight: Tensor, clamped: Tensor, partial_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and positions."""
    grad_weight = torch.empty_like(weight)
    grad_positions = torch.empty_like(clamped)
    elements = weight.shape[-1]
    key = ("gradients_by_bank", elements, weight.dtype, clamped.dtype)
    launch = plan.launches.find(key)
    if launch is None:
        new = Launch(
            kernels.gradients_by_bank,
            (plan.channels, ceil_div(elements, _ELEMENTS_OF_BANK), 1),
            (plan.channels, elements, plan.parts, *plan.tap_sizes),
            plan.window,
        )
        launch = plan.launches.keep(key, new)
    launch(weight, clamped, partial_sums, grad_weight, grad_positions)
    return grad_weight, grad_positions


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def construct_by_torch(weight: Tensor, positions: Tensor, *, size: Pair) -> Tensor:
    """Construct windows as the kernels do, by torch's operations."""
    cells = positions.to(torch.float32) + per_axis([side // 2 for side in size], positions)
    return construct_by_broadcasting(weight.to(torch.float32), cells, size).to(weight.dtype)


def convolve_elements_by_torch(
    blocks: Tensor, weight: Tensor, positions: Tensor, *, plan: BlockPlan
) -> Tensor:
    """Convolve blocks to maps as the kernels do, by torch's operations; without a bias."""
    window = construct_by_torch(weight.to(torch.float32), positions, size=plan.window)
    return convolve_by_torch(blocks, window, plan=plan)
