"""Sizes of convolution windows, in plain integers: what fits, and how much padding keeps the output size."""

from collections.abc import Sequence

from .errors import PlanError


def extent(kernel_size: int, dilation: int) -> int:
    """Cells from the first to the last element of a dilated kernel."""
    return (kernel_size - 1) * dilation + 1


def size_text(size: Sequence[int]) -> str:
    """(7, 7) -> "7x7"."""
    return "x".join(map(str, size))


def check_window(kernel_size: Sequence[int], dilation: Sequence[int], window: Sequence[int]) -> None:
    """Refuse a window in which the old kernel has no middle place.

    Raises:
        PlanError: The window is smaller than the kernel's extent, or of the other parity; says which would do.
    """
    if len(window) != len(kernel_size):
        sides = "side" if len(window) == 1 else "sides"
        raise PlanError(f"window {size_text(window)} has {len(window)} {sides}, the kernel has {len(kernel_size)}")
    for axis, (kernel, spacing, size) in enumerate(zip(kernel_size, dilation, window, strict=True)):
        old = extent(kernel, spacing)
        where = "" if len(window) == 1 else f" (axis {axis} of {size_text(window)})"
        spanning = f"kernel {kernel}" if spacing == 1 else f"kernel {kernel} with dilation {spacing}, extent {old},"
        if size < old:
            raise PlanError(f"window {size}{where} is smaller than the {spanning} that it replaces; use {old} or more")
        if (size - old) % 2:
            parity = "odd" if old % 2 else "even"
            near = [str(other) for other in (size - 1, size + 1) if other >= old]
            raise PlanError(
                f"window {size}{where} must be {parity} as the {spanning} is, or the output would shift; "
                f"use {' or '.join(near)}"
            )


def grown_padding(
    padding: str | Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int], window: Sequence[int]
) -> str | tuple[int, ...]:
    """The padding with which the window gives the output size that the old kernel gave.

    'same' stays 'same': torch pads the odd cell at the end, before and after.
    """
    check_window(kernel_size, dilation, window)
    if padding == "same":
        return padding
    old = [0] * len(window) if isinstance(padding, str) else padding  # 'valid' is no padding
    return tuple(
        pad + (size - extent(kernel, spacing)) // 2
        for pad, kernel, spacing, size in zip(old, kernel_size, dilation, window, strict=True)
    )


def grid_positions(kernel_size: int, dilation: int, window: int) -> list[int]:
    """Where the cells of the old kernel lie in the window, from its centre: (3, 2, 7) -> [-2, 0, 2]."""
    first = (window - extent(kernel_size, dilation)) // 2 - window // 2
    return [first + index * dilation for index in range(kernel_size)]
