"""Sizes of convolution windows in plain integers: which windows fit, which padding they need."""

import math
from collections.abc import Sequence
from typing import TypeGuard, cast

from .errors import PlanError

MAX_CELLS = 1 << 28  # of one layer's constructed kernels: a gigabyte in float32
# TensorFlow's SAME padding, which depends on the input's size, as in timm's Conv2dSame.
DYNAMIC_SAME = "dynamic_same"
Pair = tuple[int, int]
AsymmetricPadding = tuple[Pair, ...]  # cells before and after each axis
# "same", "valid", DYNAMIC_SAME, or cells on either side of each axis.
Padding = str | tuple[int, ...] | AsymmetricPadding


def is_asymmetric(padding: Padding) -> TypeGuard[AsymmetricPadding]:
    """Whether the padding states the cells before and after each axis separately."""
    return not isinstance(padding, str) and any(isinstance(cells, tuple) for cells in padding)


def ceil_div(amount: int, unit: int) -> int:
    """How many whole units hold the amount."""
    return (amount + unit - 1) // unit


def extent(kernel_size: int, dilation: int) -> int:
    """Cells from the first to the last element of a dilated kernel."""
    return (kernel_size - 1) * dilation + 1


def size_text(size: Sequence[int]) -> str:
    """(7, 7) -> "7x7"."""
    return "x".join(map(str, size))


def check_window(
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    window: Sequence[int],
    dense_axes: Sequence[int] = (),
) -> None:
    """Check that a window can replace an old kernel.

    Raises:
        PlanError: The window is smaller than the old extent, or of the other parity, or it changes
            the size of a dense axis.
    """
    if len(window) != len(kernel_size):
        sides = "side" if len(window) == 1 else "sides"
        raise PlanError(
            f"window {size_text(window)} has {len(window)} {sides}, "
            f"the kernel has {len(kernel_size)}"
        )
    for axis, (kernel, spacing, size) in enumerate(zip(kernel_size, dilation, window, strict=True)):
        old = extent(kernel, spacing)
        if axis in dense_axes and (size != kernel or old != kernel):
            raise PlanError(f"dense axis {axis} must keep its size {kernel}, undilated")
        where = str(size)
        if len(window) > 1:
            where += f" (axis {axis} of {size_text(window)})"
        replaced = f"kernel {kernel}"
        if spacing > 1:
            replaced += f" with dilation {spacing}, extent {old},"
        _check_side(size, old, where, replaced)


def _check_side(size: int, old: int, where: str, replaced: str) -> None:
    """Refuse (PlanError) the window's size along one axis, for a kernel of the extent `old`."""
    if size < old:
        raise PlanError(
            f"window {where} is smaller than the {replaced} that it replaces; use {old} or more"
        )
    if (size - old) % 2:
        parity = "odd" if old % 2 else "even"
        near = str(size + 1)
        if size - 1 >= old:
            near = f"{size - 1} or {near}"
        raise PlanError(
            f"window {where} must be {parity} as the {replaced} is, or the output would shift; "
            f"use {near}"
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
    """The padding with which a window keeps the output size and the old kernel's centre.

    The window must be one that `check_window` accepts. PlanError: dynamic SAME padding of a kernel
    that is smaller than its stride.
    """
    extents = list(map(extent, kernel_size, dilation))
    if padding == DYNAMIC_SAME:
        for kernel, old, step in zip(kernel_size, extents, stride, strict=True):
            if old < step:  # SAME may then cut cells off instead of padding; a window would not
                raise PlanError(
                    f"dynamic SAME padding needs a kernel of at least the stride {step}, "
                    f"not {kernel}"
                )
    if padding in ("same", DYNAMIC_SAME):
        # Both put an odd cell at the end, for kernel and window alike.
        return str(padding)
    old_cells = static_padding(padding, extents)
    pairs = []
    for (before, after), size, old in zip(old_cells, window, extents, strict=True):
        grown = (size - old) // 2
        pairs.append((before + grown, after + grown))
    if is_asymmetric(padding):
        return tuple(pairs)
    return tuple(before for before, _ in pairs)


def static_padding(padding: Padding, extents: Sequence[int]) -> list[Pair]:
    """Cells to add before and after each axis of any input, for a kernel of these extents.

    The padding is not DYNAMIC_SAME, which needs the input's size: see `padded_cells`.
    """
    if padding == "valid":
        return [(0, 0)] * len(extents)
    if padding == "same":
        return [_halves(side - 1) for side in extents]
    if is_asymmetric(padding):
        return list(padding)
    return [(cells, cells) for cells in cast(tuple[int, ...], padding)]


def padded_cells(
    padding: Padding, input_size: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> list[Pair]:
    """Cells to add before and after each axis of an input, for a kernel of these extents.

    `input_size` and `stride` matter for DYNAMIC_SAME alone.
    """
    if padding != DYNAMIC_SAME:
        return static_padding(padding, extents)
    pairs = []
    for size, side, step in zip(input_size, extents, stride, strict=True):
        outputs = ceil_div(size, step)
        pairs.append(_halves(max((outputs - 1) * step + side - size, 0)))
    return pairs


def _halves(cells: int) -> Pair:
    """Cells before and after; an odd one comes after."""
    before = cells // 2
    return before, cells - before


def grid_positions(kernel_size: int, dilation: int, window: int) -> list[int]:
    """The old kernel's cells along an axis, from the window's centre: (3, 2, 7) -> [-2, 0, 2]."""
    first = (window - extent(kernel_size, dilation)) // 2 - window // 2
    return [first + index * dilation for index in range(kernel_size)]


def position_limits(size: int) -> tuple[int, int]:
    """The first and last cell of a window of `size` cells, counted from its centre.

    (-8, 8) for 17 cells, (-4, 3) for 8.
    """
    return -(size // 2), (size - 1) // 2


def learnt_axes(dims: int, dense_axes: Sequence[int] = ()) -> tuple[int, ...]:
    """The spatial axes along which elements have a position, in the order of `positions`."""
    return tuple(axis for axis in range(dims) if axis not in dense_axes)


def along_learnt_axes(sides: Sequence[int], dense_axes: Sequence[int]) -> tuple[int, ...]:
    """The sides of a kernel or window along the axes on which elements have a position."""
    return tuple(sides[axis] for axis in learnt_axes(len(sides), dense_axes))
