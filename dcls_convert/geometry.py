"""Compute with window sizes, as plain integers: which windows fit, and what padding they need."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from .errors import PlanError
from .text import count_text

MAX_CELLS = 1 << 28  # in one layer's constructed kernels; 1 GiB in float32
# TensorFlow's SAME padding, which depends on the input's size, as in timm's Conv2dSame.
DYNAMIC_SAME = "dynamic_same"
Pair = tuple[int, int]
# "same", "valid" or DYNAMIC_SAME; or, for each axis, a number of cells on either side, or a pair:
# cells before and after the axis.
Padding = str | tuple[int | Pair, ...]
# Where a window's new cells lie along an axis: on both sides of the old kernel, before it, or
# behind it.
Grow = Literal["both", "back", "ahead"]
Direction = Literal["back", "ahead"]


def plain_numbers(value: Any) -> Any:
    """Convert numbers of NumPy and torch to Python's; several numbers become a tuple.

    Other values stay as they are.
    """
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {int}:
            return tuple(value)
        return tuple(map(plain_numbers, value))
    if hasattr(value, "tolist"):  # scalars, arrays and tensors
        return plain_numbers(value.tolist())
    return value


def on_every_axis(value: Any, dims: int) -> tuple[int, ...]:
    """Return a number for each axis; a single number, which torch allows, is for all axes."""
    if type(value) is tuple and set(map(type, value)) == {int}:
        numbers: Any = value  # the most frequent case
    else:
        numbers = plain_numbers(value)
    several: tuple[int, ...] = numbers if isinstance(numbers, tuple) else (numbers,)
    return several * dims if len(several) == 1 else several


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
    grow: Sequence[Grow] = (),
) -> None:
    """Check that a window can replace an old kernel.

    Args:
        kernel_size, dilation: Size and dilation of the old kernel.
        window: The window.
        dense_axes: Axes along which nothing is learnt.
        grow: How the window grows along each axis; empty means to both sides.

    Raises:
        PlanError: The window is smaller than the old extent, or it changes the size of a dense
            axis. Or it grows to both sides, by an odd number of cells.
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
        is_one_sided = bool(grow) and grow[axis] != "both"
        if size >= old_extent and (is_one_sided or (size - old_extent) % 2 == 0):
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


def new_cells(window: int, old_extent: int, grow: Grow) -> Pair:
    """Return how many cells of a window lie before and after the old kernel along an axis:

    window 6, extent 4, both: . x x x x .     back: . . x x x x     ahead: x x x x . .
    """
    growth = window - old_extent
    if grow == "back":
        return growth, 0
    if grow == "ahead":
        return 0, growth
    return growth // 2, growth - growth // 2


def all_new_cells(
    window: Sequence[int], extents: Sequence[int], grow: Sequence[Grow]
) -> list[Pair]:
    """Return the `new_cells` of each axis."""
    grows = grow_of_axes(grow, len(window))
    return [new_cells(*axis) for axis in zip(window, extents, grows, strict=True)]


def grow_of_axes(grow: Sequence[Grow], dims: int) -> tuple[Grow, ...]:
    """Return how a window grows along each axis; empty means to both sides along all."""
    both: Grow = "both"
    return tuple(grow) or (both,) * dims


def grown_padding(
    padding: Padding,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    grow: Sequence[Grow] = (),
) -> Padding:
    """Return the padding with which a window keeps the output size and the old kernel's place.

    If the window grows to one side along an axis, the old padding is returned: the layer adds the
    window's new cells to it. `check_window` must have accepted the window.

    Raises:
        PlanError: Dynamic SAME padding of a kernel that is smaller than its stride, or that grows
            to one side.
    """
    if not set(grow) <= {"both"}:
        if padding == DYNAMIC_SAME:
            raise PlanError("with dynamic SAME padding, a window can only grow to both sides")
        return padding
    extents = list(map(extent, kernel_size, dilation))
    if padding == DYNAMIC_SAME:
        for kernel, old_extent, step in zip(kernel_size, extents, stride, strict=True):
            if old_extent < step:  # SAME may then crop cells, which a larger window would still see
                raise PlanError(
                    f"dynamic SAME padding needs a kernel of at least the stride {step}, "
                    f"not {kernel}"
                )
    if padding in ("same", DYNAMIC_SAME):
        # Change nothing: for a kernel of any size, both rules pad the extra cell at the end.
        return str(padding)
    grown: list[Pair] = []
    for axis, (before, after) in enumerate(static_padding(padding, extents)):
        growth = (window[axis] - extents[axis]) // 2
        grown.append((before + growth, after + growth))
    return as_padding(grown)


def as_padding(pairs: Sequence[Pair]) -> tuple[int | Pair, ...]:
    """Return a `Padding` of pairs (before, after); a pair of equal numbers becomes one number."""
    return tuple([before if before == after else (before, after) for before, after in pairs])


def static_padding(padding: Padding, extents: Sequence[int]) -> list[Pair]:
    """Return the cells to add before and after each axis of an input of any size.

    `extents` are the kernel's. The padding must not be DYNAMIC_SAME, which needs the input's size:
    see `padded_cells`.
    """
    if padding == "valid":
        return [(0, 0)] * len(extents)
    if padding == "same":
        return [_halves(length - 1) for length in extents]
    pairs = []
    for cells in padding:
        assert not isinstance(cells, str)
        pairs.append((cells, cells) if isinstance(cells, int) else cells)
    return pairs


def is_uneven(padding: Padding) -> bool:
    """True if a padding states different numbers of cells before and after an axis."""
    return tuple in map(type, padding)


def padding_with_new_cells(
    padding: Sequence[Pair], new: Sequence[Pair], mode: str
) -> tuple[list[Pair], list[Pair]]:
    """Return the cells to pad by the padding mode, and the cells of zeros to add around them.

    Reflect and circular padding copy inputs from elsewhere on the map, such as later times. In
    these modes, the new cells of a window that grows to one side are therefore zeros.

    Args:
        padding: The old kernel's padding before and after each axis.
        new: The window's new cells before and after each axis.
        mode: The padding mode, as in `torch.nn.Conv2d`.
    """
    by_mode = []
    zeros = []
    for (before, after), (new_before, new_after) in zip(padding, new, strict=True):
        if mode in ("reflect", "circular") and new_before != new_after:
            by_mode.append((before, after))
            zeros.append((new_before, new_after))
        else:
            by_mode.append((before + new_before, after + new_after))
            zeros.append((0, 0))
    return by_mode, zeros


def keeps_centre(padding: Pair, old_extent: int, stride: int) -> bool:
    """True if this padding keeps each output at the middle of the inputs that the kernel sees.

    That is, `old_extent - stride <= before + after <= old_extent - 1`, with one cell of slack for
    an even kernel, and with at most one cell more after than before.

    These paddings do not keep the centre: none (valid convolutions, patches, maps padded
    elsewhere), and `old_extent - 1` cells on either side (causal, if the tail is cut off).
    """
    before, after = padding
    cells = before + after
    if old_extent == 1:
        return cells == 0
    if not 0 <= after - before <= 1 or cells == 0 or before == old_extent - 1:
        return False
    rounding = 1 - old_extent % 2  # an even kernel has no cell in its middle
    return old_extent - stride - rounding <= cells <= old_extent - 1 + rounding


def padded_cells(
    padding: Padding, input_size: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> list[Pair]:
    """Return the cells to add before and after each axis of an input.

    `extents` are the kernel's. `input_size` and `stride` are used only for DYNAMIC_SAME.
    """
    if padding != DYNAMIC_SAME:
        return static_padding(padding, extents)
    pairs = []
    for size, kernel_extent, step in zip(input_size, extents, stride, strict=True):
        outputs = ceil_div(size, step)
        pairs.append(_halves(max((outputs - 1) * step + kernel_extent - size, 0)))
    return pairs


def _halves(cells: int) -> Pair:
    """Split a number of cells into cells before and after; an odd cell goes after."""
    before = cells // 2
    return before, cells - before


def grid_positions(kernel_size: int, dilation: int, window: int, grow: Grow = "both") -> list[int]:
    """Return the positions of the old kernel's cells along an axis: (3, 2, 7) -> [-2, 0, 2].

    They count from the window's centre.
    """
    before, _ = new_cells(window, extent(kernel_size, dilation), grow)
    first = before - window // 2
    return [first + index * dilation for index in range(kernel_size)]


def old_centre(old_limits: Pair, grow: Grow) -> float:
    """Return the position around which elements start along an axis: the old kernel's middle.

    In a window that grows to both sides, it is the window's own centre, 0.
    """
    return 0.0 if grow == "both" else sum(old_limits) / 2


def position_limits(size: int) -> tuple[int, int]:
    """Return the first and last cell of a window of `size` cells, counted from its centre.

    For 17 cells, (-8, 8); for 8, (-4, 3).
    """
    return -(size // 2), (size - 1) // 2


def useful_limits(window: int, old_extent: int, map_length: int | None, grow: Grow) -> Pair:
    """Return the first and last position along an axis that lie on the map for at least one output.

    Cells at other positions meet only padding. On a map of M cells, at most 2 * M - 1 positions
    are useful. In a window that grows to one side, M positions are, or the old kernel's if these
    are more. If the map's length is not known, all positions are taken as useful.
    """
    low, high = position_limits(window)
    if map_length is None:
        return low, high
    if grow == "both":
        return position_limits(min(window, 2 * map_length - 1))
    cells = max(map_length, old_extent)
    if grow == "back":
        return max(low, high - cells + 1), high
    return low, min(high, low + cells - 1)


def learnt_axes(dims: int, dense_axes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the spatial axes along which elements have a position, in `positions` order."""
    return tuple(sorted(set(range(dims)).difference(dense_axes)))


def along_learnt_axes(lengths: Sequence[int], dense_axes: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of a kernel or window along its learnt axes."""
    if not dense_axes:
        return tuple(lengths)
    return tuple([length for axis, length in enumerate(lengths) if axis not in dense_axes])
