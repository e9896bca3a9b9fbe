"""Sizes of convolution windows in plain integers: which ones fit, and which padding keeps the output size."""

import math
from collections.abc import Sequence
from typing import TypeGuard, cast

from ..errors import PlanError

MOST_CELLS = 1 << 28  # of one layer's constructed kernels: a gigabyte in float32
# TensorFlow's SAME padding, which depends on the input's size: the rule of timm's Conv2dSame and related classes.
DYNAMIC_SAME = "dynamic_same"
Pair = tuple[int, int]
Uneven = tuple[Pair, ...]  # cells before and after each axis
# "same", "valid", DYNAMIC_SAME, or cells on either side of each axis.
Padding = str | tuple[int, ...] | Uneven


def is_uneven(padding: Padding) -> TypeGuard[Uneven]:
    """Whether the padding states the cells before and after each axis apart."""
    return not isinstance(padding, str) and any(isinstance(cells, tuple) for cells in padding)


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


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
    """Refuse (PlanError) a window smaller than the old extent, of the other parity, or with another dense side."""
    if len(window) != len(kernel_size):
        sides = "side" if len(window) == 1 else "sides"
        raise PlanError(
            f"window {size_text(window)} has {len(window)} {sides}, the kernel has {len(kernel_size)}"
        )
    for axis, (kernel, spacing, size) in enumerate(zip(kernel_size, dilation, window, strict=True)):
        old = extent(kernel, spacing)
        where = "" if len(window) == 1 else f" (axis {axis} of {size_text(window)})"
        if axis in dense_axes and (size != kernel or old != kernel):
            raise PlanError(f"dense axis {axis} must keep its size {kernel}, undilated")
        spanning = (
            f"kernel {kernel}"
            if spacing == 1
            else f"kernel {kernel} with dilation {spacing}, extent {old},"
        )
        if size < old:
            raise PlanError(
                f"window {size}{where} is smaller than the {spanning} that it replaces; use {old} or more"
            )
        if (size - old) % 2:
            parity = "odd" if old % 2 else "even"
            near = [str(other) for other in (size - 1, size + 1) if other >= old]
            raise PlanError(
                f"window {size}{where} must be {parity} as the {spanning} is, or the output would shift; "
                f"use {' or '.join(near)}"
            )


def check_cells(kernels: int, window: Sequence[int]) -> None:
    """Refuse (PlanError) a window whose constructed kernels alone would fill memory."""
    cells = kernels * math.prod(window)
    if cells > MOST_CELLS:
        raise PlanError(
            f"window {size_text(window)} for {kernels:,} kernels has {cells:,} cells; {MOST_CELLS:,} are the most"
        )


def grown_padding(
    padding: Padding,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
) -> Padding:
    """The padding with which a window that `check_window` takes keeps the output size and the old kernel's centre."""
    extents = list(map(extent, kernel_size, dilation))
    if padding == DYNAMIC_SAME:
        for kernel, old, step in zip(kernel_size, extents, stride, strict=True):
            if old < step:  # SAME may then cut cells off instead of padding; a window would not
                raise PlanError(
                    f"dynamic SAME padding needs a kernel of at least the stride {step}, not {kernel}"
                )
    if padding in (
        "same",
        DYNAMIC_SAME,
    ):  # both put an odd cell at the end, for kernel and window alike
        return str(padding)
    more = [(size - old) // 2 for size, old in zip(window, extents, strict=True)]
    cells = padded_cells(padding, (), extents, ())
    pairs = tuple(
        (before + grown, after + grown) for (before, after), grown in zip(cells, more, strict=True)
    )
    return pairs if is_uneven(padding) else tuple(before for before, _ in pairs)


def padded_cells(
    padding: Padding, input_size: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> list[tuple[int, int]]:
    """Cells to add before and after each axis of an input, for a kernel of these extents."""
    if padding == "valid":
        return [(0, 0)] * len(extents)
    if padding == "same":
        totals = [window - 1 for window in extents]
    elif padding == DYNAMIC_SAME:  # as many as give ceil(size / stride) outputs
        sizes = zip(input_size, extents, stride, strict=True)
        totals = [
            max((ceil_div(size, step) - 1) * step + window - size, 0)
            for size, window, step in sizes
        ]
    elif is_uneven(padding):
        return list(padding)
    else:
        return [(cells, cells) for cells in cast(tuple[int, ...], padding)]
    return [(total // 2, total - total // 2) for total in totals]


def grid_positions(kernel_size: int, dilation: int, window: int) -> list[int]:
    """The old kernel's cells along an axis, from the window's centre: (3, 2, 7) -> [-2, 0, 2]."""
    first = (window - extent(kernel_size, dilation)) // 2 - window // 2
    return [first + index * dilation for index in range(kernel_size)]
