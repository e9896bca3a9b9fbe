"""Construct bilinear kernels of any 2-D convolution on a GPU, by one launch of a Triton kernel.

Layers clamp their positions in place in every forward pass, so positions must not be saved for
backward. The Triton kernel writes clamped copies, and these are saved.

Axes: *C kernels, E elements, R x S the window. This module needs Triton.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..depthwise import element_kernels as kernels
from ..depthwise.blocks import add_gradients, gradients_by_torch, is_on_another_gpu, needs_torch
from ..depthwise.launching import Launch, NewTensor, Pass, Workspace
from ..geometry import Pair, ceil_div
from .profiles import bilinear_by_profiles, cells_of

_WINDOW_CELLS: int = kernels.WINDOW_CELLS.value
_ELEMENTS: int = kernels.ELEMENTS.value


def construct_windows(weight: Tensor, positions: Tensor, size: Pair) -> Tensor:
    """Construct kernels: weight (*C, E), positions (2, *C, E) -> (*C, R, S), all in float32.

    Positions are in cells from the centre; the sides of the window are longer than one cell.
    """
    if not torch.compiler.is_compiling() and is_on_another_gpu(weight):
        with torch.cuda.device(weight.device):
            return construct_windows(weight, positions, size)
    return cast(Tensor, _Construction.apply(weight, positions, size)[0])


class _Construction(Function):
    """weight (*C, E), positions (2, *C, E) -> windows (*C, R, S), clamped positions.

    The clamped positions are saved for backward. They are also an output, so that autograd keeps
    their graph for second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, size: Pair) -> tuple[Tensor, Tensor]:
        ctx.size = size
        ctx.set_materialize_grads(False)
        *shape, elements = weight.shape
        count = math.prod(shape)
        cells = 1 << (size[0] * size[1] - 1).bit_length()  # a power of 2
        at_once = max(1, _WINDOW_CELLS // cells)
        launch = Launch(
            kernels.construct,
            (ceil_div(count, at_once), 1, 1),
            (count, elements),
            (*size, cells, at_once),
        )
        windows, clamped = _run(
            launch,
            {"weight": weight.contiguous(), "positions": positions.contiguous()},
            {
                "windows": NewTensor.contiguous((*shape, *size), weight.dtype, weight.device),
                "clamped": _like(positions),
            },
        )
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
        if needs_torch(grad_windows, None):
            grad_weight, grad_positions = gradients_by_torch(
                partial(construct_by_torch, size=size),
                (weight, clamped),
                grad_windows,
            )
        else:
            elements = weight.shape[-1]
            launch = Launch(
                kernels.element_gradients_of_windows,
                (ceil_div(weight.numel(), _ELEMENTS), 1, 1),
                (weight.numel() // elements, elements),
                size,
            )
            grad_weight, grad_positions = _run(
                launch,
                {
                    "weight": weight.contiguous(),
                    "clamped": clamped,
                    "gradient": grad_windows.contiguous(),
                },
                {"grad_weight": _like(weight), "grad_positions": _like(clamped)},
            )
        return grad_weight, add_gradients(grad_positions, grad_clamped), None


# Passes of a single launch, by everything that they depend on. Each layer adds a few; new image
# sizes add none.
_passes: dict[tuple[object, ...], Pass] = {}


def _like(tensor: Tensor) -> NewTensor:
    """Describe a new contiguous tensor with the shape, dtype and device of this one."""
    return NewTensor.contiguous(tuple(tensor.shape), tensor.dtype, tensor.device)


def _run(
    launch: Launch, given: dict[str, Tensor], results: dict[str, NewTensor | Workspace]
) -> list[Tensor]:
    """Launch a kernel whose arguments are the given tensors, then the results; return these."""
    is_compiling = torch.compiler.is_compiling()
    found = None
    if not is_compiling:
        types = [(tensor.device, tensor.dtype) for tensor in given.values()]
        key = (launch, *types, *results.values())
        found = _passes.get(key)
    if found is None:
        found = Pass(list(given), results, [(launch, [*given, *results])])
        if not is_compiling:
            _passes[key] = found
    return found.run(*given.values())


def construct_by_torch(weight: Tensor, positions: Tensor, size: Pair) -> Tensor:
    """Construct windows in float32 by torch's operations, as the Triton kernels do."""
    cells = cells_of(positions.to(torch.float32), size)
    return bilinear_by_profiles(weight.to(torch.float32), cells, size)
