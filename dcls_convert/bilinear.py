"""Bilinear kernel construction with gradients in closed form: Algorithms 1 and 2 of the paper, block by block.

Axes: C channels of any number (a kernel each), E kernel elements, A learnt axes, N all kernels in one axis.
`cells` are positions counted from the first cell of the window. Paper: arXiv:2112.03740.

An element's weight goes to the 2^A cells around it, in parts that are products over the axes of 1 - f and f, where f is
the fraction of its coordinate. Everything here is made of two operations that are each other's transpose, and their
derivatives along some axes, for which 1 - f and f become -1 and 1:
    scatter(weight, cells) -> kernel,   gather(kernel, cells) -> what lies at the elements, interpolated.
The derivative of either is made of both, so that any derivative of any order and in either mode comes out.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

# On a CPU, so many elements at a time: their temporary tensors stay in the cache and take no memory worth speaking of.
BLOCK_ELEMENTS = 32768
EXACT_FLOAT32_INTEGER = 2**24

Size = tuple[int, ...]  # of the window along the learnt axes, in cells
Along = tuple[int, ...]  # axes along which the derivative is meant


def bilinear_kernel(weight: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """Spreads every element over the cells around it, overlaps added.

    Args:
        weight: (*C, E), float32 or float64.
        positions: (A, *C, E), in cells from the kernel centre; outside the window, the border is taken.
        size: Of the window, one entry an axis.

    Returns:
        (*C, *size).
    """
    # A copy: a layer clamps its positions in place at every forward, also between another forward and its backward.
    cells = positions + _halves(positions, size)
    for axis, length in enumerate(size):
        if length == 1:  # it has no fraction, and no gradient; not a number must still be seen
            weight = weight * (1 + 0 * cells[axis])
    wide = [axis for axis, length in enumerate(size) if length > 1]
    if not wide:
        return weight.sum(-1).reshape(*weight.shape[:-1], *size)
    if len(wide) < len(size):
        cells = cells[wide]
    kernel: Tensor = _Scatter.apply(weight, cells, tuple(size[axis] for axis in wide), ())
    return kernel.reshape(*weight.shape[:-1], *size)


def needs_plain_operations(tensor: Tensor) -> bool:
    """Whether a graph of operations is being made, or a subclass of Tensor brings its own ones."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return torch.compiler.is_compiling() or tracing or type(tensor) not in (Tensor, nn.Parameter)


def _halves(positions: Tensor, size: Sequence[int]) -> Tensor | int:
    """The kernel centre's cell along each axis, to be added to positions."""
    halves = [length // 2 for length in size]
    if len(set(halves)) == 1:
        return halves[0]
    return positions.new_tensor(halves).reshape(-1, *[1] * (positions.dim() - 1))


class _Scatter(Function):
    """weight (*C, E), cells (A, *C, E) -> kernel (*C, *size)."""

    @staticmethod
    def forward(weight: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
        return _scatter(weight, cells, size, along)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, cells, ctx.size, ctx.along = inputs
        ctx.save_for_backward(weight, cells)
        ctx.save_for_forward(weight, cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, cells = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not torch.is_grad_enabled() and not ctx.along:
            grad_weight, grad_cells = _Gradients.apply(grad, weight, cells, ctx.size, *needs)
        else:
            grad_weight = _Gather.apply(grad, cells, ctx.size, ctx.along) if needs[0] else None
            grad_cells = weight * _slopes(grad, cells, ctx.size, ctx.along) if needs[1] else None
        return grad_weight, grad_cells, None, None

    @staticmethod
    def jvp(ctx: Any, weight_change: Tensor, cells_change: Tensor, *_: None) -> Tensor:
        weight, cells = ctx.saved_tensors
        change: Tensor = _Scatter.apply(weight_change, cells, ctx.size, ctx.along)
        for axis in _other(ctx.size, ctx.along):
            change = change + _Scatter.apply(weight * cells_change[axis], cells, ctx.size, (*ctx.along, axis))
        return change

    @staticmethod
    def vmap(info: Any, in_dims: Any, weight: Tensor, cells: Tensor, size: Size, along: Along) -> tuple[Tensor, int]:
        weight, cells = _batched(info, in_dims, (weight, 0), (cells, 1))
        return _Scatter.apply(weight, cells, size, along), 0


class _Gather(Function):
    """kernel (*C, *size), cells (A, *C, E) -> (*C, E)."""

    @staticmethod
    def forward(kernel: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
        return _gather(kernel, cells, size, along)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        kernel, cells, ctx.size, ctx.along = inputs
        ctx.save_for_backward(kernel, cells)
        ctx.save_for_forward(kernel, cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        kernel, cells = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_kernel = _Scatter.apply(grad, cells, ctx.size, ctx.along) if needs[0] else None
        grad_cells = grad * _slopes(kernel, cells, ctx.size, ctx.along) if needs[1] else None
        return grad_kernel, grad_cells, None, None

    @staticmethod
    def jvp(ctx: Any, kernel_change: Tensor, cells_change: Tensor, *_: None) -> Tensor:
        kernel, cells = ctx.saved_tensors
        change: Tensor = _Gather.apply(kernel_change, cells, ctx.size, ctx.along)
        return change + (cells_change * _slopes(kernel, cells, ctx.size, ctx.along)).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, kernel: Tensor, cells: Tensor, size: Size, along: Along) -> tuple[Tensor, int]:
        kernel, cells = _batched(info, in_dims, (kernel, 0), (cells, 1))
        return _Gather.apply(kernel, cells, size, along), 0


class _Gradients(Function):
    """All gradients of `_Scatter` from one gathering, where they need no gradients of their own."""

    @staticmethod
    def forward(
        grad: Tensor, weight: Tensor, cells: Tensor, size: Size, of_weight: bool, of_cells: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return _gradients(grad, weight, cells, size, of_weight, of_cells)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, Tensor | None]) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, weight: Tensor, cells: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int | None, int | None]]:
        grad, weight, cells = _batched(info, in_dims, (grad, 0), (weight, 0), (cells, 1))
        gradients = _Gradients.apply(grad, weight, cells, *rest)
        return gradients, (None if gradients[0] is None else 0, None if gradients[1] is None else 1)


def _other(size: Size, along: Along) -> Along:
    """The axes along which a derivative is left: a second one along the same axis is 0."""
    return tuple(axis for axis in range(len(size)) if axis not in along)


def _slopes(kernel: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
    """The derivatives of `_Gather` with respect to cells, (A, *C, E)."""
    left = _other(size, along)
    slopes = [_Gather.apply(kernel, cells, size, (*along, axis)) if axis in left else None for axis in range(len(size))]
    zero = torch.zeros_like(cells[0])
    return torch.stack([zero if slope is None else slope for slope in slopes])


def _batched(info: Any, in_dims: Sequence[int | None], *tensors: tuple[Tensor, int]) -> list[Tensor]:
    """The tensors with vmap's dimension at the place that is given, as one more channel."""
    return [
        tensor.unsqueeze(place).expand(*tensor.shape[:place], info.batch_size, *tensor.shape[place:])
        if dim is None
        else tensor.movedim(dim, place)
        for (tensor, place), dim in zip(tensors, in_dims, strict=False)
    ]


# Without autograd: on plain numbers.


def _scatter(weight: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
    """weight (*C, E), cells (A, *C, E) -> (*C, *size)."""
    weights, coordinates = _rows(weight), _rows(cells, 1)  # (N, E), (A, N, E)
    kernel = weight.new_empty(weights.shape[0], math.prod(size))  # (N, cells of the window)
    for block in _blocks(weights):
        index, fractions = _corners(coordinates[:, block], size)
        part = kernel[block].zero_()
        shares = _shares(weights[block], fractions, along)
        for offset, share in zip(_offsets(size), shares, strict=True):
            part[:, offset:].scatter_add_(1, index, share)
    return kernel.view(*weight.shape[:-1], *size)


def _gather(kernel: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
    """kernel (*C, *size), cells (A, *C, E) -> (*C, E)."""
    coordinates = _rows(cells, 1)  # (A, N, E)
    flat = kernel.reshape(coordinates.shape[1], math.prod(size))
    result = kernel.new_empty(coordinates.shape[1:])
    for block in _blocks(result):
        index, fractions = _corners(coordinates[:, block], size)
        values = [flat[block, offset:].gather(1, index) for offset in _offsets(size)]
        for axis in reversed(range(len(size))):
            values = [
                high - low if axis in along else torch.addcmul(low, high - low, fractions[axis])
                for low, high in _pairs(values)
            ]
        result[block] = values[0]
    return result.view(cells.shape[1:])


def _gradients(
    grad: Tensor, weight: Tensor, cells: Tensor, size: Size, of_weight: bool, of_cells: bool
) -> tuple[Tensor | None, Tensor | None]:
    """grad (*C, *size), weight (*C, E), cells (A, *C, E) -> gradients of weight and cells."""
    weights, coordinates = _rows(weight), _rows(cells, 1)  # (N, E), (A, N, E)
    flat = grad.reshape(weights.shape[0], math.prod(size))
    grad_weights = weights.new_empty(weights.shape) if of_weight else None
    grad_coordinates = coordinates.new_empty(coordinates.shape) if of_cells else None
    for block in _blocks(weights):
        index, fractions = _corners(coordinates[:, block], size)
        values = [flat[block, offset:].gather(1, index) for offset in _offsets(size)]
        slopes: dict[int, list[Tensor]] = {}  # of the axes so far
        for axis in reversed(range(len(size))):
            fraction = fractions[axis]
            steps = [high - low for low, high in _pairs(values)]
            if of_weight or axis > 0:
                values = [torch.addcmul(low, step, fraction) for low, step in zip(values[::2], steps, strict=True)]
            if of_cells:
                slopes = {one: [low.lerp(high, fraction) for low, high in _pairs(s)] for one, s in slopes.items()}
                slopes[axis] = steps
        if grad_weights is not None:
            grad_weights[block] = values[0]
        if grad_coordinates is not None:
            for axis, (slope,) in slopes.items():
                torch.mul(weights[block], slope, out=grad_coordinates[axis, block])
    return (
        None if grad_weights is None else grad_weights.view(weight.shape),
        None if grad_coordinates is None else grad_coordinates.view(cells.shape),
    )


def _rows(tensor: Tensor, first: int = 0) -> Tensor:
    """All axes from `first` to the last but one, as one."""
    return tensor.reshape(*tensor.shape[:first], math.prod(tensor.shape[first:-1]), tensor.shape[-1])


def _blocks(rows: Tensor) -> Iterator[slice]:
    """rows (N, E) -> parts of N: some elements at a time on a CPU, all at once elsewhere."""
    count, elements = rows.shape
    step = max(1, BLOCK_ELEMENTS // max(elements, 1)) if rows.device.type == "cpu" else max(count, 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _corners(cells: Tensor, size: Size) -> tuple[Tensor, list[Tensor]]:
    """cells (A, n, E) -> the cell below each element on all axes, as index into the flat window, and its fractions.

    On an axis, the cell below is at most size - 2: at the upper border the fraction is 1, and derivatives point inward.
    """
    exact = cells.dtype if math.prod(size) <= EXACT_FLOAT32_INTEGER else torch.float64
    index, fractions = None, []
    for coordinate, length in zip(cells, size, strict=True):
        inside = coordinate.clamp(0, length - 1)
        lower = inside.floor().clamp_(max=length - 2)
        fractions.append(inside.sub_(lower))
        index = lower.to(exact) if index is None else torch.add(lower, index, alpha=length)
    assert index is not None
    # Not a number stays one in the fractions, but must not become an index.
    return index.nan_to_num_(0.0).long(), fractions


def _offsets(size: Size) -> list[int]:
    """From the cell below on all axes to each corner, in the flat window; the last axis changes fastest."""
    offsets = [0]
    for axis in range(len(size)):
        offsets = [offset + step for offset in offsets for step in (0, math.prod(size[axis + 1 :]))]
    return offsets


def _shares(weight: Tensor, fractions: Sequence[Tensor], along: Along) -> list[Tensor]:
    """What of the weight each corner gets, in the order of `_offsets`."""
    shares = [weight]
    for axis, fraction in enumerate(fractions):
        upper = [share if axis in along else share * fraction for share in shares]
        lower = [-share if axis in along else share - up for share, up in zip(shares, upper, strict=True)]
        shares = [part for pair in zip(lower, upper, strict=True) for part in pair]
    return shares


def _pairs(values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(values[::2], values[1::2], strict=True))
