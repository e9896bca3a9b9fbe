"""Triton kernels that construct windows from elements in 2-D, and compute the elements' gradients.

Bilinear interpolation, as in `layers.bilinear`: positions are clamped to the window, and at a kink
the derivative is right-hand, or points inward at the upper border. NaN stays NaN.

Axes: N kernels, E elements, R x S the window. Weight is (N, E), positions are (2, N, E) in cells
from the centre. In 64 x 64 matrices, `block_kernels` says what the rows and columns are.
"""

import triton
import triton.language as tl

from .block_kernels import (
    CELLS,
    GATHERED,
    MAP_SIZES,
    PACK_CHANNELS,
    SIDE,
    STRIDES,
    TAPS,
    gradient_of_bias,
    pack,
    sum_diagonals,
)

WINDOW_CELLS = tl.constexpr(512)  # cells that one program of `construct` makes
ELEMENTS = tl.constexpr(512)  # elements in a program of `element_gradients_of_windows`
ELEMENTS_IN_PRODUCT = tl.constexpr(32)  # elements in one product of `make_matrix`
NEAR = tl.constexpr(16)  # power of 2; a matrix depends on 2 * SIDE - 1 cells along each axis


@triton.jit
def place_in_window(positions, offset, exists, LENGTH: tl.constexpr):
    """Return the cell below each position, the distance from it, and the clamped position.

    Positions inside the window stay as they are, to the last bit.
    """
    position = tl.load(positions + offset, mask=exists, other=0.0).to(tl.float32)
    place = position + LENGTH // 2
    inside = tl.minimum(tl.maximum(place, 0.0), LENGTH - 1.0)
    inside = tl.where(place == place, inside, place)
    lower = tl.minimum(tl.maximum(inside.to(tl.int32), 0), LENGTH - 2)
    clamped = tl.minimum(tl.maximum(position, -1.0 * (LENGTH // 2)), LENGTH - 1.0 - LENGTH // 2)
    return lower, inside - lower, tl.where(position == position, clamped, position)


@triton.jit
def shares(cell, lower, fraction):
    """Return how much of an element each cell of an axis gets."""
    return tl.where(cell == lower, 1 - fraction, 0.0) + tl.where(cell == lower + 1, fraction, 0.0)


@triton.jit
def interpolate_gradients(
    value, top_left, top_right, bottom_left, bottom_right, fraction_y, fraction_x
):
    """Return the gradients of elements (weight, row, column).

    `value` holds the elements' weights. The next four hold the gradients of the cells around each
    element, and the fractions its distances from the upper left cell.
    """
    top = top_left + (top_right - top_left) * fraction_x
    bottom = bottom_left + (bottom_right - bottom_left) * fraction_x
    left = top_left + (bottom_left - top_left) * fraction_y
    right = top_right + (bottom_right - top_right) * fraction_y
    return top + (bottom - top) * fraction_y, value * (bottom - top), value * (right - left)


@triton.jit(
    do_not_specialize=["kernels", "elements"],
    do_not_specialize_on_alignment=["weight", "positions"],
)
def construct(
    weight,
    positions,
    windows,
    clamped,
    kernels,
    elements,
    R: tl.constexpr,
    S: tl.constexpr,
    CELLS_PADDED: tl.constexpr,
    KERNELS: tl.constexpr,
):
    """Construct KERNELS windows (N, R, S), and write clamped positions (2, N, E)."""
    kernel = tl.program_id(0) * KERNELS + tl.arange(0, KERNELS)[:, None]
    cell = tl.arange(0, CELLS_PADDED)[None, :]
    is_kernel = kernel < kernels
    first = kernel.to(tl.int64) * elements
    second = tl.cast(kernels, tl.int64) * elements  # where the second coordinate begins
    total = tl.zeros((KERNELS, CELLS_PADDED), dtype=tl.float32)
    for element in range(elements):
        offset = first + element
        y, fraction_y, clamped_y = place_in_window(positions, offset, is_kernel, R)
        x, fraction_x, clamped_x = place_in_window(positions, second + offset, is_kernel, S)
        tl.store(clamped + offset, clamped_y, mask=is_kernel)
        tl.store(clamped + second + offset, clamped_x, mask=is_kernel)
        value = tl.load(weight + offset, mask=is_kernel, other=0.0).to(tl.float32)
        total += value * shares(cell // S, y, fraction_y) * shares(cell % S, x, fraction_x)
    windows += kernel.to(tl.int64) * (R * S) + cell
    tl.store(windows, total.to(windows.dtype.element_ty), mask=is_kernel & (cell < R * S))


@triton.jit(
    do_not_specialize=["kernels", "elements"],
    do_not_specialize_on_alignment=["weight", "gradient"],
)
def element_gradients_of_windows(
    weight,
    positions,
    gradient,
    grad_weight,
    grad_positions,
    kernels,
    elements,
    R: tl.constexpr,
    S: tl.constexpr,
):
    """Compute the gradients of weight and positions from the windows' gradient (N, R, S)."""
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    second = tl.cast(kernels, tl.int64) * elements
    exists = element < second
    y, fraction_y, _ = place_in_window(positions, element, exists, R)
    x, fraction_x, _ = place_in_window(positions, second + element, exists, S)
    corner = gradient + element // elements * (R * S) + y * S + x
    top_left = tl.load(corner, mask=exists, other=0.0).to(tl.float32)
    top_right = tl.load(corner + 1, mask=exists, other=0.0).to(tl.float32)
    bottom_left = tl.load(corner + S, mask=exists, other=0.0).to(tl.float32)
    bottom_right = tl.load(corner + S + 1, mask=exists, other=0.0).to(tl.float32)
    value = tl.load(weight + element, mask=exists, other=0.0).to(tl.float32)
    grad_value, grad_row, grad_column = interpolate_gradients(
        value, top_left, top_right, bottom_left, bottom_right, fraction_y, fraction_x
    )
    tl.store(grad_weight + element, grad_value, mask=exists)
    tl.store(grad_positions + element, grad_row, mask=exists)
    tl.store(grad_positions + second + element, grad_column, mask=exists)


@triton.jit(
    do_not_specialize=[*STRIDES, *MAP_SIZES, *TAPS, "elements"],
    do_not_specialize_on_alignment=["weight", "positions"],
)
def pack_and_make_bank(
    maps,
    blocks,
    weight,
    positions,
    clamped,
    bank,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    channels,
    rows,
    columns,
    block_rows,
    block_columns,
    blocks_in_all,
    taps_down,
    taps_across,
    elements,
    UNIT: tl.constexpr,
    CHANNELS_ADJACENT: tl.constexpr,
    COLUMNS_ADJACENT: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Pack maps in the first programs, as `pack` does, and make the bank in the other programs."""
    program = tl.program_id(0)
    if program < blocks_in_all:
        pack(
            maps,
            blocks,
            blocks,
            image_stride,
            channel_stride,
            row_stride,
            column_stride,
            channels,
            rows,
            columns,
            block_rows,
            block_columns,
            blocks_in_all,
            1,
            1,
            UNIT,
            CHANNELS_ADJACENT,
            COLUMNS_ADJACENT,
            UNPACK=False,
            SUM=False,
        )
    else:
        matrix = program - blocks_in_all
        channel = tl.program_id(1) * PACK_CHANNELS + matrix % PACK_CHANNELS
        sizes = (channels * UNIT, elements, taps_down, taps_across)
        if channel < channels * UNIT:
            tap = matrix // PACK_CHANNELS
            make_matrix(weight, positions, clamped, bank, tap, channel, sizes, R, S, WINDOWS)


@triton.jit
def make_matrix(
    weight,
    positions,
    clamped,
    bank,
    tap,
    channel,
    sizes,
    R: tl.constexpr,
    S: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Write the matrix of one tap and channel, and, for the first tap, clamped positions (2, C, E).

    The matrix depends on the NEAR x NEAR cells of the window around the tap's offset. These cells
    are a product: (rows, elements) x (elements, columns). If WINDOWS, weight holds the windows
    instead: (C, R, S).
    """
    channels, elements, taps_down, taps_across = sizes
    near = tl.arange(0, NEAR)
    r = (tap // taps_across - taps_down // 2) * SIDE + near - (SIDE - 1) + R // 2
    s = (tap % taps_across - taps_across // 2) * SIDE + near - (SIDE - 1) + S // 2
    if WINDOWS:
        exists = ((r >= 0) & (r < R))[:, None] & ((s >= 0) & (s < S))[None, :]
        cell = weight + channel * (R * S) + r[:, None] * S + s[None, :]
        total = tl.load(cell, mask=exists, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((NEAR, NEAR), dtype=tl.float32)
        for first in range(0, elements, ELEMENTS_IN_PRODUCT):
            element = first + tl.arange(0, ELEMENTS_IN_PRODUCT)
            exists = element < elements
            offset_y = channel * elements + element
            offset_x = channels * elements + offset_y
            y, fraction_y, clamped_y = place_in_window(positions, offset_y, exists, R)
            x, fraction_x, clamped_x = place_in_window(positions, offset_x, exists, S)
            is_written = exists & (tap == 0)
            tl.store(clamped + offset_y, clamped_y, mask=is_written)
            tl.store(clamped + offset_x, clamped_x, mask=is_written)
            value = tl.load(weight + offset_y, mask=exists, other=0.0).to(tl.float32)
            in_rows = shares(r[:, None], y[None, :], fraction_y[None, :])
            in_columns = shares(s[None, :], x[:, None], fraction_x[:, None])
            total = tl.dot(value[None, :] * in_rows, in_columns, total, input_precision="ieee")
    entry = tl.arange(0, CELLS * CELLS)
    cell_in = entry // CELLS
    cell_out = entry % CELLS
    down = cell_in // SIDE - cell_out // SIDE + (SIDE - 1)
    across = cell_in % SIDE - cell_out % SIDE + (SIDE - 1)
    matrix = tl.gather(tl.reshape(total, (NEAR * NEAR,)), down * NEAR + across, 0)
    bank += (tl.cast(channel, tl.int64) * (taps_down * taps_across) + tap) * (CELLS * CELLS)
    tl.store(bank + entry, matrix.to(bank.dtype.element_ty))


@triton.jit(
    do_not_specialize=["channels", "elements", "parts", "blocks_in_all", *TAPS],
    do_not_specialize_on_alignment=["weight"],
)
def element_gradients_of_bank(
    weight,
    positions,
    partial_sums,
    sums,
    grad_weight,
    grad_positions,
    grad_bias,
    channels,
    elements,
    parts,
    blocks_in_all,
    taps_down,
    taps_across,
    R: tl.constexpr,
    S: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WINDOWS: tl.constexpr,
):
    """Compute the gradients of a channel's elements and bias.

    The gradients come from partial sums of the bank's gradient, and from sums of blocks of
    gradients. If WINDOWS, weight holds windows (C, R, S), and there are no positions.
    """
    channel = tl.program_id(0)
    element = tl.program_id(1) * GATHERED + tl.arange(0, GATHERED)
    exists = element < elements
    offset = channel * elements + element
    sizes = (channels, parts, taps_down, taps_across)
    if WINDOWS:
        y = element // S
        x = element % S
        total = sum_diagonals(partial_sums, y, x, exists, channel, sizes, R, S)
        tl.store(grad_weight + offset, total, mask=exists)
    else:
        y, fraction_y, _ = place_in_window(positions, offset, exists, R)
        x, fraction_x, _ = place_in_window(positions, channels * elements + offset, exists, S)
        top_left = sum_diagonals(partial_sums, y, x, exists, channel, sizes, R, S)
        top_right = sum_diagonals(partial_sums, y, x + 1, exists, channel, sizes, R, S)
        bottom_left = sum_diagonals(partial_sums, y + 1, x, exists, channel, sizes, R, S)
        bottom_right = sum_diagonals(partial_sums, y + 1, x + 1, exists, channel, sizes, R, S)
        value = tl.load(weight + offset, mask=exists, other=0.0).to(tl.float32)
        grad_value, grad_row, grad_column = interpolate_gradients(
            value, top_left, top_right, bottom_left, bottom_right, fraction_y, fraction_x
        )
        tl.store(grad_weight + offset, grad_value, mask=exists)
        tl.store(grad_positions + offset, grad_row, mask=exists)
        tl.store(grad_positions + channels * elements + offset, grad_column, mask=exists)
    if HAS_BIAS:
        if tl.program_id(1) == 0:
            gradient_of_bias(sums, grad_bias, channel, blocks_in_all)
