"""Bilinear kernel construction: Algorithms 1 and 2 of the paper, arXiv:2112.03740.

Axes: *C channels (any number of axes, with one kernel for each entry), E kernel elements, A learnt
axes, N all kernels on a single axis. `cells` are positions counted from the window's first cell.

Bilinear elements are triangles with a sigma of 1, which `profiles` constructs for all cases. Two
implementations are faster, and give the same kernel and the same gradients:

| when                                    | which                                              |
| --------------------------------------- | -------------------------------------------------- |
| 2-D, on a GPU with Triton               | `gpu_construction`                                 |
| eager, elsewhere                        | `_BilinearKernel`, in blocks of kernels            |
| otherwise (compiled, torch.func,        | `profiles.bilinear_by_profiles`                    |
| exports), and for second derivatives    |                                                    |
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..depthwise.eager import is_being_compiled, is_eager, uses_cpu_implementation
from ..depthwise.table import takes_kernels
from .profiles import WindowSize, bilinear_by_profiles, cells_of

# Elements per thread in a block on a CPU. Temporary tensors then fit into the cache. torch does not
# divide work into smaller pieces than this.
BLOCK_ELEMENTS = 32768
MAX_THREADS = 8  # cap on threads when sizing blocks; bounds memory
# On other devices, elements x window cells in a block: 256 MiB in float32.
MAX_PRODUCTS = 1 << 26


def bilinear_kernel(weight: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """Construct kernels: weight (*C, E), positions (A, *C, E) -> (*C, *size).

    Positions are in cells from the kernel centre. The tensors are float32 or float64.
    """
    window = tuple(size)
    eager = is_eager(weight, positions)
    if (
        len(size) == 2
        and min(size) > 1
        and weight.dtype == torch.float32
        and weight.numel() > 0
        and (eager or is_being_compiled(weight, positions))
        and takes_kernels(weight.device)
    ):
        from .gpu_construction import construct_windows  # needs Triton

        return construct_windows(weight, positions, (size[0], size[1]))
    # A layer clamps its positions in place in every forward pass, so they must not be saved for
    # backward. The sum is a copy, even if it adds 0.
    cells = cells_of(positions, window)
    if eager and min(size) > 1:
        return cast(Tensor, _BilinearKernel.apply(weight, cells, window))
    return bilinear_by_profiles(weight, cells, window)


class _BilinearKernel(Function):
    """weight (*C, E), cells (A, *C, E) -> kernel (*C, *size)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cells: Tensor, size: WindowSize) -> Tensor:
        """Construct the kernel by the paper's Algorithm 1."""
        ctx.size = size
        ctx.save_for_backward(weight, cells)
        flat_weight = weight.flatten(0, -2)  # (N, E)
        flat_cells = cells.flatten(1, -2)  # (A, N, E)
        # (N, cells of the window)
        kernel = weight.new_empty(flat_weight.shape[0], math.prod(size))
        if not kernel.is_meta:  # on meta there are no values, and operations are slow
            for block_kernel, block_weight, block_cells in _blocks(kernel, flat_weight, flat_cells):
                if uses_cpu_implementation(weight):
                    _scatter_block_(block_kernel, block_weight, block_cells, size)
                else:
                    constructed = bilinear_by_profiles(block_weight, block_cells, size)
                    block_kernel.copy_(constructed.flatten(1))
        return kernel.view(*weight.shape[:-1], *size)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute the gradients by the paper's Algorithm 2.

        `grad_output` may be a batch (`is_grads_batched`), so nothing that depends on it is changed
        in place.
        """
        weight, cells = ctx.saved_tensors
        size = ctx.size
        if torch.is_grad_enabled():
            # With create_graph=True, the gradients must be differentiable.
            construct = functools.partial(bilinear_by_profiles, size=size)
            gradients = torch.func.vjp(construct, weight, cells)[1]
            grad_weight, grad_cells = gradients(grad_output)
            return grad_weight, grad_cells, None
        flat_weight = weight.flatten(0, -2)  # (N, E)
        flat_cells = cells.flatten(1, -2)  # (A, N, E)
        # (N, cells of the window)
        flat_grad_output = grad_output.reshape(len(flat_weight), math.prod(size))
        grad_weights: list[Tensor] = []
        grad_coordinates: list[Tensor] = []
        for block_grad, block_weight, block_cells in _blocks(
            flat_grad_output, flat_weight, flat_cells
        ):
            value, slopes = _interpolate(block_grad, block_cells, size)
            grad_weights.append(value)
            grad_coordinates.append(block_weight * slopes)
        grad_weight = torch.cat(grad_weights).reshape(weight.shape)
        grad_cells = torch.cat(grad_coordinates, 1).reshape(cells.shape)
        return grad_weight, grad_cells, None


def _scatter_block_(kernel: Tensor, weight: Tensor, cells: Tensor, size: WindowSize) -> None:
    """Fill kernel (n, cells of the window) from weight (n, E) and cells (A, n, E)."""
    lowest_index, fractions = _lowest_corner(cells, size)
    parts = [weight]  # the weight's part at each corner, in the order of `_corner_views`
    for fraction in fractions:
        parts_with_axis: list[Tensor] = []
        for part in parts:
            upper_part = part * fraction
            parts_with_axis += [part - upper_part, upper_part]
        parts = parts_with_axis
    kernel.zero_()
    for corner_view, part in zip(_corner_views(kernel, size), parts, strict=True):
        corner_view.scatter_add_(1, lowest_index, part)


def _interpolate(grad: Tensor, cells: Tensor, size: WindowSize) -> tuple[Tensor, Tensor]:
    """Interpolate `grad` (n, cells of the window) at the elements, and compute its slopes there.

    cells (A, n, E) -> values (n, E) and slopes (A, n, E).
    """
    lowest_index, fractions = _lowest_corner(cells, size)
    corner_views = _corner_views(grad, size)
    values = torch.stack([view.gather(1, lowest_index) for view in corner_views])  # (corners, n, E)
    slopes: list[Tensor] = []  # along the axes so far, the first axis first
    for fraction in reversed(fractions):  # neighbouring corners differ on the last remaining axis
        step = values[1::2] - values[::2]
        values = torch.addcmul(values[::2], step, fraction)
        slopes_with_axis = [step]
        for slope in slopes:
            slopes_with_axis.append(slope[::2].lerp(slope[1::2], fraction))
        slopes = slopes_with_axis
    return values[0], torch.cat(slopes)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors (N, any) or (A, N, E) along N into blocks of a bounded size.

    The first tensor is (N, cells of the window), and the last one has E elements.
    """
    elements = tensors[-1].shape[-1]
    if uses_cpu_implementation(tensors[-1]):
        max_elements = BLOCK_ELEMENTS * min(torch.get_num_threads(), MAX_THREADS)
    else:
        max_elements = MAX_PRODUCTS // tensors[0].shape[-1]
    kernels_in_block = max(1, max_elements // max(elements, 1))
    splits: list[tuple[Tensor, ...]] = []
    for tensor in tensors:
        splits.append(torch.split(tensor, kernels_in_block, tensor.dim() - 2))
    return zip(*splits, strict=True)


def _lowest_corner(cells: Tensor, size: WindowSize) -> tuple[Tensor, list[Tensor]]:
    """Return the cell below each element, and how far the element lies above it on each axis.

    cells (A, n, E) -> index into the flat window (n, E), and A fractions (n, E).
    """
    index: Tensor | None = None
    fractions: list[Tensor] = []
    for coordinate, length in zip(cells, size, strict=True):
        inside = coordinate.clamp(0, length - 1)
        # At most length - 2: at the upper border, the fraction is then 1, and the derivative
        # points inward.
        # A cast instead of `floor`, which would wake all threads even for a few elements.
        # The cast makes some integer of NaN; the clamp keeps it inside the window, and the fraction
        # is still NaN.
        lower = inside.to(torch.int32).clamp_(0, length - 2)
        fractions.append(inside.sub_(lower))
        index = lower if index is None else torch.add(lower, index, alpha=length)
    assert index is not None
    return index.long(), fractions


def _corner_views(kernel: Tensor, size: WindowSize) -> list[Tensor]:
    """Return views of kernel (n, cells of the window), one for each corner, last axis fastest.

    If an element's lowest corner has index i in the kernel, each of its other corners has index i
    in the view of that corner.
    """
    offsets = [0]  # from the lowest corner, in cells of the flat window
    for axis in range(len(size)):
        stride = math.prod(size[axis + 1 :])
        offsets_with_axis: list[int] = []
        for offset in offsets:
            offsets_with_axis += [offset, offset + stride]
        offsets = offsets_with_axis
    length = kernel.shape[1] - offsets[-1]
    views: list[Tensor] = []
    for offset in offsets:
        views.append(kernel.narrow(1, offset, length))
    return views
