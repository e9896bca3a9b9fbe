"""Compute with window sizes, as plain integers: which windows fit, and what padding they need."""

import math
from collections.abc import Sequence
from typing import Any, cast

from .errors import PlanError
from .text import count_text

MAX_CELLS = 1 << 28  # in one layer's constructed kernels; 1 GiB in float32
# TensorFlow's SAME padding, which depends on the input's size, as in timm's Conv2dSame.
DYNAMIC_SAME = "dynamic_same"
Pair = tuple[int, int]
# "same", "valid", DYNAMIC_SAME, or cells on either side of each axis.
Padding = str | tuple[int, ...]


def plain_numbers(value: Any) -> Any:
    """Return Python's numbers for those of NumPy and torch, a tuple for several.

    Other values stay as they are.
    """
    if isinstance(value, list | tuple):
        return tuple(map(plain_numbers, value))
    if hasattr(value, "tolist"):  # scalars, arrays and tensors
        return plain_numbers(value.tolist())
    return value


def ceil_div(amount: int, unit: int) -> int:
    """Return amount / unit, rounded up."""
    return (amount + unit - 1) // unit


def extent(kernel_size: int, dilation: int) -> int:
    """Return how many cells a dilated kernel spans along an axis."""
    return (kernel_size - 1) * dilation + 1


def size_text(size: Sequence[int]) -> str:
    """Format a size: (7, 7) -> "7x7"."""
    return "x".join(map(str, size))


def check_window(
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    window: Sequence[int],
    dense_axes: Sequence[int] = (),
) -> None:
    """Check that a window can replace an old kernel.

    Raises:
        PlanError: The window is smaller than the old extent, or one is odd and the other even, or
            the window changes the size of a dense axis.
    """
    if len(window) != len(kernel_size):
        raise PlanError(
            f"window {size_text(window)} has {count_text(len(window), 'side')}, "
            f"the kernel has {len(kernel_size)}"
        )
    for axis, (kernel, spacing, size) in enumerate(zip(kernel_size, dilation, window, strict=True)):
        old_extent = extent(kernel, spacing)
        if axis in dense_axes and (size != kernel or old_extent != kernel):
            raise PlanError(f"dense axis {axis} must keep its size {kernel}, undilated")
        if size >= old_extent and (size - old_extent) % 2 == 0:
            continue
        side_text = str(size)
        if len(window) > 1:
            side_text += f" (axis {axis} of {size_text(window)})"
        kernel_text = f"kernel {kernel}"
        if spacing > 1:
            kernel_text += f" with dilation {spacing}, extent {old_extent},"
        if size < old_extent:
            raise PlanError(
                f"window {side_text} is smaller than the {kernel_text} that it replaces; "
                f"use {old_extent} or more"
            )
        parity = "odd" if old_extent % 2 else "even"
        allowed = str(size + 1)
        if size - 1 >= old_extent:
            allowed = f"{size - 1} or {allowed}"
        raise PlanError(
            f"window {side_text} must be {parity} as the {kernel_text} is, "
            f"or the output would shift; use {allowed}"
        )


def check_cells(kernels: int, window: Sequence[int]) -> None:
    """Refuse (PlanError) a window whose constructed kernels alone would fill memory."""
    cells = kernels * math.prod(window)
    if cells > MAX_CELLS:
        raise PlanError(
            f"window {size_text(window)} for {kernels:,} kernels has {cells:,} cells; "
            f"at most {MAX_CELLS:,} are allowed"
        )


def grown_padding(
    padding: Padding,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
) -> Padding:
    """Return the padding with which a window keeps the output size and the old kernel's centre.

    The window must be one that `check_window` accepts.

    Raises:
        PlanError: Dynamic SAME padding of a kernel that is smaller than its stride.
    """
    extents = list(map(extent, kernel_size, dilation))
    if padding == DYNAMIC_SAME:
        for kernel, old_extent, step in zip(kernel_size, extents, stride, strict=True):
            if old_extent < step:  # SAME may then crop cells, which a larger window would still see
                raise PlanError(
                    f"dynamic SAME padding needs a kernel of at least the stride {step}, "
                    f"not {kernel}"
                )
    if padding in ("same", DYNAMIC_SAME):
        # Both rules put an odd cell at the end, so they also hold for the window.
        return str(padding)
    old_cells = static_padding(padding, extents)
    grown = []
    for (cells, _), size, old_extent in zip(old_cells, window, extents, strict=True):
        grown.append(cells + (size - old_extent) // 2)
    return tuple(grown)


def static_padding(padding: Padding, extents: Sequence[int]) -> list[Pair]:
    """Return the cells to add before and after each axis of an input of any size.

    `extents` are the kernel's. The padding must not be DYNAMIC_SAME, which needs the input's size:
    see `padded_cells`.
    """
    if padding == "valid":
        return [(0, 0)] * len(extents)
    if padding == "same":
        return [_halves(side - 1) for side in extents]
    return [(cells, cells) for cells in cast(tuple[int, ...], padding)]


def keeps_centre(cells: int, old_extent: int, stride: int) -> bool:
    """True if this padding keeps each output over the middle of what the kernel sees.

    `cells` are added on either side of an axis. Both sides together must have from
    `old_extent - stride` to `old_extent - 1` cells; for an even kernel, they may have one cell less
    or more.

    These paddings do not keep the centre: none (valid convolutions, patches, maps padded
    elsewhere), and `old_extent - 1` cells on either side (causal, if the tail is cut off).
    """
    if old_extent == 1:
        return cells == 0
    if cells in (0, old_extent - 1):
        return False
    rounding = 1 - old_extent % 2  # an even kernel has no cell in its middle
    return old_extent - stride - rounding <= 2 * cells <= old_extent - 1 + rounding


def padded_cells(
    padding: Padding, input_size: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> list[Pair]:
    """Return the cells to add before and after each axis of an input.

    `extents` are the kernel's. `input_size` and `stride` are used only for DYNAMIC_SAME.
    """
    if padding != DYNAMIC_SAME:
        return static_padding(padding, extents)
    pairs = []
    for size, side, step in zip(input_size, extents, stride, strict=True):
        outputs = ceil_div(size, step)
        pairs.append(_halves(max((outputs - 1) * step + side - size, 0)))
    return pairs


def _halves(cells: int) -> Pair:
    """Split cells into those before and those after; an odd cell goes after."""
    before = cells // 2
    return before, cells - before


def grid_positions(kernel_size: int, dilation: int, window: int) -> list[int]:
    """Return the positions of the old kernel's cells along an axis: (3, 2, 7) -> [-2, 0, 2].

    They count from the window's centre.
    """
    first = (window - extent(kernel_size, dilation)) // 2 - window // 2
    return [first + index * dilation for index in range(kernel_size)]


def position_limits(size: int) -> tuple[int, int]:
    """Return the first and last cell of a window of `size` cells, counted from its centre.

    For 17 cells, (-8, 8); for 8, (-4, 3).
    """
    return -(size // 2), (size - 1) // 2


def learnt_axes(dims: int, dense_axes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the spatial axes along which elements have a position, in `positions` order."""
    return tuple(sorted(set(range(dims)).difference(dense_axes)))


def along_learnt_axes(sides: Sequence[int], dense_axes: Sequence[int]) -> tuple[int, ...]:
    """Return the sides of a kernel or window along its learnt axes."""
    return tuple([sides[axis] for axis in learnt_axes(len(sides), dense_axes)])
