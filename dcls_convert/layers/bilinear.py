"""Bilinear kernel construction with gradients in closed form: Algorithms 1 and 2 of the paper, block by block.

Axes: C channels of any number (a kernel each), E kernel elements, A learnt axes, N all kernels in one axis.
`cells` are positions counted from the first cell of the window. Paper: arXiv:2112.03740.

An element's weight goes to the 2^A cells around it, in parts that are products over the axes of 1 - f and f, where f is
the fraction of its coordinate. Everything here is made of two operations that are each other's transpose, and their
derivatives along some axes, for which 1 - f and f become -1 and 1:
    scatter(weight, cells) -> kernel,   gather(kernel, cells) -> what lies at the elements, interpolated.
The derivative of either is made of both, so that any derivative of any order and in either mode comes out.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

# On a CPU, so many elements at a time for each thread: temporary tensors stay in the cache, and small.
# It is what torch gives a thread at least.
BLOCK_ELEMENTS = 32768
MOST_THREADS = 8  # that bound the memory

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
            grad_weight, grad_cells = _gradients(grad, weight, cells, ctx.size, *needs)
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
    # On meta there are no values, and operations take longer than on the CPU.
    blocks = [] if kernel.is_meta else _blocks(kernel, weights, coordinates)
    for some_kernel, some_weight, some_cells in blocks:
        index, fractions = _corners(some_cells, size)
        shares = _shares(some_weight, fractions, along)
        for corner, share in zip(_shifted(some_kernel.zero_(), size), shares, strict=True):
            corner.scatter_add_(1, index, share)
    return kernel.view(*weight.shape[:-1], *size)


def _gather(kernel: Tensor, cells: Tensor, size: Size, along: Along) -> Tensor:
    """kernel (*C, *size), cells (A, *C, E) -> (*C, E)."""
    coordinates = _rows(cells, 1)  # (A, N, E)
    flat = kernel.reshape(coordinates.shape[1], math.prod(size))
    results = []
    for some_kernel, some_cells in _blocks(flat, coordinates):
        index, fractions = _corners(some_cells, size)
        values = [corner.gather(1, index) for corner in _shifted(some_kernel, size)]
        for axis in reversed(range(len(size))):
            values = [
                high - low if axis in along else torch.addcmul(low, high - low, fractions[axis])
                for low, high in _pairs(values)
            ]
        results += values
    return _joined(results, 0, cells[0])


def _gradients(
    grad: Tensor, weight: Tensor, cells: Tensor, size: Size, of_weight: bool, of_cells: bool
) -> tuple[Tensor | None, Tensor | None]:
    """All gradients of `_scatter` from one gathering: Algorithm 2 of the paper.

    grad (*C, *size), weight (*C, E), cells (A, *C, E) -> gradients of weight and cells. Nothing is changed in place
    that hangs on `grad`, so that it may stand for a batch of gradients (`is_grads_batched`).
    """
    weights, coordinates = _rows(weight), _rows(cells, 1)  # (N, E), (A, N, E)
    flat = grad.reshape(weights.shape[0], math.prod(size))
    grad_weights, grad_coordinates = [], []
    for some_grad, some_weight, some_cells in _blocks(flat, weights, coordinates):
        index, fractions = _corners(some_cells, size)
        values = [corner.gather(1, index) for corner in _shifted(some_grad, size)]
        slopes: list[list[Tensor]] = []  # of the axes so far, the first one first
        for axis in reversed(range(len(size))):
            fraction = fractions[axis]
            steps = [high - low for low, high in _pairs(values)]
            if of_weight or axis > 0:
                values = [torch.addcmul(low, step, fraction) for low, step in zip(values[::2], steps, strict=True)]
            if of_cells:
                slopes = [steps, *([low.lerp(high, fraction) for low, high in _pairs(slope)] for slope in slopes)]
        if of_weight:
            grad_weights += values
        if of_cells:
            grad_coordinates.append(some_weight * torch.stack([slope for (slope,) in slopes]))
    return (
        _joined(grad_weights, 0, weight) if of_weight else None,
        _joined(grad_coordinates, 1, cells) if of_cells else None,
    )


def _joined(blocks: list[Tensor], dim: int, like: Tensor) -> Tensor:
    joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
    return joined.reshape(like.shape)


def _rows(tensor: Tensor, first: int = 0) -> Tensor:
    """All axes from `first` to the last but one, as one."""
    return tensor.reshape(*tensor.shape[:first], math.prod(tensor.shape[first:-1]), tensor.shape[-1])


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of N: some elements at a time on a CPU, all at once elsewhere.

    The tensors are (N, any) or (A, N, E), the last one with E elements.
    """
    count, elements = tensors[-1].shape[-2:]
    step = max(count, 1)
    if tensors[-1].device.type == "cpu":
        threads = min(torch.get_num_threads(), MOST_THREADS)
        step = max(1, BLOCK_ELEMENTS * threads // max(elements, 1))
    if count <= step:
        return iter([tensors])
    return zip(*(torch.split(tensor, step, tensor.dim() - 2) for tensor in tensors), strict=True)


def _corners(cells: Tensor, size: Size) -> tuple[Tensor, list[Tensor]]:
    """cells (A, n, E) -> the cell below each element on all axes, as index into the flat window, and its fractions.

    On an axis, the cell below is at most size - 2: at the upper border the fraction is 1, and derivatives point inward.
    """
    index, fractions = None, []
    for coordinate, length in zip(cells, size, strict=True):
        inside = coordinate.clamp(0, length - 1)
        # Cut off, since `floor` wakes all threads even for a few elements. Not a number becomes any integer here, which
        # is brought into the window, and stays one in the fraction.
        lower = inside.to(torch.int32).clamp_(0, length - 2)
        fractions.append(inside.sub_(lower))
        index = lower if index is None else torch.add(lower, index, alpha=length)
    assert index is not None
    return index.long(), fractions


def _shifted(kernel: Tensor, size: Size) -> list[Tensor]:
    """kernel (n, cells of the window) -> for each corner, the view in which it has the index of the lowest corner.

    The last axis changes fastest.
    """
    offsets = _offsets(size)
    return [kernel.narrow(1, offset, kernel.shape[1] - offsets[-1]) for offset in offsets]


@functools.cache
def _offsets(size: Size) -> tuple[int, ...]:
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    return tuple(sum(steps) for steps in itertools.product(*((0, stride) for stride in strides)))


def _shares(weight: Tensor, fractions: Sequence[Tensor], along: Along) -> list[Tensor]:
    """What of the weight each corner gets, in the order of `_shifted`."""
    shares = [weight]
    for axis, fraction in enumerate(fractions):
        upper = [share if axis in along else share * fraction for share in shares]
        lower = [-share if axis in along else share - up for share, up in zip(shares, upper, strict=True)]
        shares = [part for pair in zip(lower, upper, strict=True) for part in pair]
    return shares


def _pairs(values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(values[::2], values[1::2], strict=True))
