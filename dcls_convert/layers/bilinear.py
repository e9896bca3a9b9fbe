"""Bilinear kernel construction: Algorithms 1 and 2 of the paper, arXiv:2112.03740.

Axes: C channels of any number (a kernel each), E kernel elements, A learnt axes, N all kernels in one axis.
`cells` are positions counted from the first cell of the window.

Four forms with equal results: plain operations for compilers and derivatives of any kind; blocks with the first
derivative in closed form; on GPUs, where scattered additions have no fixed order, products over the whole window; and
matrix products in exports, since translators of scattered additions exist for few formats, and some are wrong.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..depthwise.eager import is_eager, is_exported, on_cpu

# On a CPU, elements per thread and block: temporary tensors stay in the cache. torch gives a thread at least as many.
BLOCK_ELEMENTS = 32768
MOST_THREADS = 8  # Cap on threads when sizing blocks; bounds memory.
MOST_PRODUCTS = 1 << 26  # Elsewhere, elements x cells of the window in a block: 256 MiB in float32.

Size = tuple[int, ...]  # of the window along the learnt axes, in cells


def bilinear_kernel(weight: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """weight (*C, E), positions (A, *C, E) in cells from the kernel centre -> (*C, *size); float32 or float64."""
    # The sum is a copy: a layer clamps its positions in place at every forward, so they must not be saved for backward.
    halves = [length // 2 for length in size]
    cells = positions + (halves[0] if len(set(halves)) == 1 else per_axis(halves, positions))
    for axis, length in enumerate(size):
        if (
            length == 1
        ):  # One cell: no fraction and no gradient, but NaN in a position must reach the kernel.
            weight = weight * (1 + 0 * cells[axis])
    wide = [axis for axis, length in enumerate(size) if length > 1]
    if not wide:
        return weight.sum(-1).reshape(*weight.shape[:-1], *size)
    if len(wide) < len(size):
        cells = torch.stack(
            [cells[axis] for axis in wide]
        )  # cells[wide] would copy its index from the host
    wide_size = tuple(size[axis] for axis in wide)
    if is_eager(weight, cells):
        kernel: Tensor = _Construct.apply(weight, cells, wide_size)
    elif is_exported():
        kernel = of_matrix_products(weight, cells, wide_size)
    elif on_cpu(weight):
        kernel = of_plain_operations(weight, cells, wide_size)
    else:
        kernel = of_products(weight, cells, wide_size)
    return kernel.reshape(*weight.shape[:-1], *size)


def per_axis(values: Sequence[float], like: Tensor) -> Tensor:
    """One number for each learnt axis, to be broadcast with positions."""
    # Filled in on the device: a copy from the host would wait for it, and cannot be part of a CUDA graph.
    filled = [torch.full((1,), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.cat(filled).reshape(-1, *[1] * (like.dim() - 1))


def clamped(value: Tensor, low: float, high: float) -> Tensor:
    """`value` inside [low, high], with the gradient of the identity, so that nothing gets stuck beyond a limit."""
    fixed = value.detach()
    return fixed.clamp(low, high) + (value - fixed)


def of_plain_operations(weight: Tensor, cells: Tensor, size: Size) -> Tensor:
    """weight (*C, E), cells (A, *C, E) -> (*C, *size), each corner of all elements in one addition. Sides above 1."""
    corners = [
        (torch.zeros_like(weight, dtype=torch.long), weight)
    ]  # place in the flat window, and share
    for coordinate, length in zip(cells, size, strict=True):
        inside = clamped(coordinate, 0, length - 1)
        # At most length - 2: at the upper border the fraction is 1, and the derivative points inward.
        # NaN stays in the fraction, but must not become an index.
        lower = inside.detach().floor().clamp(0, length - 2).nan_to_num(0.0)
        steps = [(lower.long(), 1 - (inside - lower)), (lower.long() + 1, inside - lower)]
        corners = [
            (place * length + index, share * part)
            for place, share in corners
            for index, part in steps
        ]
    flat = weight.new_zeros(*weight.shape[:-1], math.prod(size))  # (*C, cells of the window)
    for place, share in corners:
        flat = flat.scatter_add(-1, place, share)
    return flat.reshape(*weight.shape[:-1], *size)


def of_products(
    weight: Tensor, cells: Tensor, size: Size, *, differentiable: bool = True
) -> Tensor:
    """weight (*C, E), cells (A, *C, E) -> (*C, *size): for each cell, a sum over all elements. Sides above 1."""
    # With derivatives, weights and coordinates are expanded over the window before anything else, so that each gradient
    # is one sum over the window of products: a compiler fuses all of them into one loop.
    rest = [1] * len(size)
    whole = (*weight.shape, *size)
    kernel = weight.reshape(*weight.shape, *rest)
    if differentiable:
        kernel = kernel.expand(whole)
    for axis, (coordinate, length) in enumerate(zip(torch.split(cells, 1), size, strict=True)):
        grid = torch.arange(length, dtype=weight.dtype, device=weight.device).reshape(
            length, *rest[axis + 1 :]
        )
        inside = coordinate.detach().clamp(0, length - 1).reshape(*weight.shape, *rest)
        part = (1 - (grid - inside).abs()).relu()  # (*C, E, length, 1, ...)
        if differentiable:
            # Right-hand at cells, and inward at the upper border, unlike those of relu and abs.
            beyond = grid - inside.floor().clamp(max=length - 2)
            slope = (beyond == 1).to(part.dtype) - (beyond == 0).to(part.dtype)
            moved = (coordinate - coordinate.detach()).reshape(
                *weight.shape, *rest
            )  # zero, with a gradient
            part = part + slope * moved.expand(whole)
        kernel = kernel * part
    return kernel.sum(-1 - len(size))


def of_matrix_products(weight: Tensor, cells: Tensor, size: Size) -> Tensor:
    """weight (*C, E), cells (A, *C, E) -> (*C, *size), without scattered additions. Sides above 1."""
    spread_weight = weight.unsqueeze(-1)  # (*C, E, cells of the axes so far)
    for coordinate, length in zip(cells[:-1], size[:-1], strict=True):
        shares = _shares_of_cells(coordinate, length)
        spread_weight = (spread_weight.unsqueeze(-1) * shares.unsqueeze(-2)).flatten(-2)
    # coremltools knows no `mT`.
    kernel = spread_weight.transpose(-1, -2) @ _shares_of_cells(cells[-1], size[-1])
    return kernel.reshape(*weight.shape[:-1], *size)


def _shares_of_cells(coordinate: Tensor, length: int) -> Tensor:
    """(*C, E) -> (*C, E, length): how much of each element every cell of an axis gets."""
    inside = clamped(coordinate, 0, length - 1).unsqueeze(-1)
    lower = inside.detach().floor().clamp(0, length - 2)  # as in `of_plain_operations`
    fraction = inside - lower
    distance = torch.arange(length, dtype=inside.dtype, device=inside.device) - lower
    return (distance == 0).to(inside.dtype) * (1 - fraction) + (distance == 1).to(
        inside.dtype
    ) * fraction


class _Construct(Function):
    """weight (*C, E), cells (A, *C, E) -> kernel (*C, *size)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cells: Tensor, size: Size) -> Tensor:
        """Algorithm 1."""
        ctx.size = size
        ctx.save_for_backward(weight, cells)
        weights, coordinates = weight.flatten(0, -2), cells.flatten(1, -2)  # (N, E), (A, N, E)
        kernel = weight.new_empty(weights.shape[0], math.prod(size))  # (N, cells of the window)
        # On meta there are no values, and operations take longer than on the CPU.
        for some_kernel, some_weight, some_cells in (
            [] if kernel.is_meta else _blocks(kernel, weights, coordinates)
        ):
            if not on_cpu(weight):
                some_kernel.copy_(
                    of_products(some_weight, some_cells, size, differentiable=False).flatten(1)
                )
                continue
            index, fractions = _corners(some_cells, size)
            shares = [
                some_weight
            ]  # what of the weight each corner gets, in the order of `_shifted`
            for fraction in fractions:
                upper = [share * fraction for share in shares]
                shares = [
                    part
                    for share, up in zip(shares, upper, strict=True)
                    for part in (share - up, up)
                ]
            for corner, share in zip(_shifted(some_kernel.zero_(), size), shares, strict=True):
                corner.scatter_add_(1, index, share)
        return kernel.view(*weight.shape[:-1], *size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Algorithm 2. Changes nothing in place that depends on `grad`: it may be a batch (`is_grads_batched`)."""
        (weight, cells), size = ctx.saved_tensors, ctx.size
        if torch.is_grad_enabled():
            # A graph of the gradients is wanted (create_graph=True): the plain form has derivatives of any order.
            gradients = torch.func.vjp(
                functools.partial(of_plain_operations, size=size), weight, cells
            )[1]
            return *gradients(grad), None
        weights, coordinates = weight.flatten(0, -2), cells.flatten(1, -2)  # (N, E), (A, N, E)
        flat = grad.reshape(weights.shape[0], math.prod(size))
        grad_weights, grad_coordinates = [], []
        for some_grad, some_weight, some_cells in _blocks(flat, weights, coordinates):
            index, fractions = _corners(some_cells, size)
            values = torch.stack(
                [corner.gather(1, index) for corner in _shifted(some_grad, size)]
            )  # (corners, n, E)
            slopes: list[Tensor] = []  # of the axes so far, the first one first
            for fraction in reversed(fractions):
                steps = values[1::2] - values[::2]
                values = torch.addcmul(values[::2], steps, fraction)
                slopes = [steps, *(slope[::2].lerp(slope[1::2], fraction) for slope in slopes)]
            grad_weights.append(values[0])
            grad_coordinates.append(some_weight * torch.cat(slopes))
        return (
            torch.cat(grad_weights).reshape(weight.shape),
            torch.cat(grad_coordinates, 1).reshape(cells.shape),
            None,
        )


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Parts of N, of tensors (N, any) or (A, N, E); first (N, cells of the window), last with E elements."""
    elements = tensors[-1].shape[-1]
    if on_cpu(tensors[-1]):
        most = BLOCK_ELEMENTS * min(torch.get_num_threads(), MOST_THREADS)
    else:
        most = MOST_PRODUCTS // tensors[0].shape[-1]
    step = max(1, most // max(elements, 1))
    return zip(*(torch.split(tensor, step, tensor.dim() - 2) for tensor in tensors), strict=True)


def _corners(cells: Tensor, size: Size) -> tuple[Tensor, list[Tensor]]:
    """cells (A, n, E) -> the cell below each element on all axes, as index into the flat window, and its fractions."""
    index, fractions = None, []
    for coordinate, length in zip(cells, size, strict=True):
        inside = coordinate.clamp(0, length - 1)
        # At most length - 2, as above. Cut off rather than `floor`, which wakes all threads even for a few elements.
        # NaN becomes any integer here, is clamped into the window, and stays NaN in the fraction.
        lower = inside.to(torch.int32).clamp_(0, length - 2)
        fractions.append(inside.sub_(lower))
        index = lower if index is None else torch.add(lower, index, alpha=length)
    assert index is not None
    return index.long(), fractions


def _shifted(kernel: Tensor, size: Size) -> list[Tensor]:
    """kernel (n, cells) -> for each corner, last axis fastest, the view in which it has the lowest corner's index."""
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    offsets = [sum(steps) for steps in itertools.product(*((0, stride) for stride in strides))]
    return [kernel.narrow(1, offset, kernel.shape[1] - offsets[-1]) for offset in offsets]
