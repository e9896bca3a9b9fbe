"""Triton kernels from the elements of 2-D kernels to windows, and back to the elements' gradients.

Bilinear interpolation, as in `bilinear`: positions are clamped to the window, and at a kink the
derivative is right-hand, or points inward at the upper border. NaN stays NaN.

Axes: N kernels, E elements, R x S the window. Weight is (N, E), positions are (2, N, E) in cells
from the centre. In 64 x 64 matrices, `block_kernels` says what the rows and columns are.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from ..depthwise.block_kernels import CELLS, SIDE

WINDOW_CELLS = constexpr(512)  # of one program of `construct`
ELEMENTS = constexpr(512)  # of one program of `gradients_of_elements`
ELEMENTS_OF_BANK = constexpr(16)  # of one program of `gradients_by_bank`
NEAR = constexpr(16)  # power of 2; a matrix depends on 2 * SIDE - 1 cells along each axis


@triton.jit
def place_in_window(positions, offset, exists, LENGTH: constexpr):
    """Return the cell below each position, the distance from it, and the clamped position."""
    place = tl.load(positions + offset, mask=exists, other=0.0).to(tl.float32) + LENGTH // 2
    inside = tl.minimum(tl.maximum(place, 0.0), LENGTH - 1.0)
    inside = tl.where(place == place, inside, place)
    lower = tl.minimum(tl.maximum(inside.to(tl.int32), 0), LENGTH - 2)
    return lower, inside - lower, inside - LENGTH // 2


@triton.jit
def shares(cell, lower, fraction):
    """Return how much of an element each cell of an axis gets."""
    return tl.where(cell == lower, 1 - fraction, 0.0) + tl.where(cell == lower + 1, fraction, 0.0)


@triton.jit
def store_gradients(
    weight,
    grad_weight,
    grad_y,
    grad_x,
    top_left,
    top_right,
    bottom_left,
    bottom_right,
    above_y,
    above_x,
    exists,
):
    """Store the gradients of elements, from those of the four cells that each is spread over."""
    top = top_left + (top_right - top_left) * above_x
    bottom = bottom_left + (bottom_right - bottom_left) * above_x
    left = top_left + (bottom_left - top_left) * above_y
    right = top_right + (bottom_right - top_right) * above_y
    value = tl.load(weight, mask=exists, other=0.0).to(tl.float32)
    tl.store(grad_weight, top + (bottom - top) * above_y, mask=exists)
    tl.store(grad_y, value * (bottom - top), mask=exists)
    tl.store(grad_x, value * (right - left), mask=exists)


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
    R: constexpr,
    S: constexpr,
    CELLS_PADDED: constexpr,
    KERNELS: constexpr,
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
        y, above_y, clamped_y = place_in_window(positions, offset, is_kernel, R)
        x, above_x, clamped_x = place_in_window(positions, second + offset, is_kernel, S)
        tl.store(clamped + offset, clamped_y, mask=is_kernel)
        tl.store(clamped + second + offset, clamped_x, mask=is_kernel)
        value = tl.load(weight + offset, mask=is_kernel, other=0.0).to(tl.float32)
        total += value * shares(cell // S, y, above_y) * shares(cell % S, x, above_x)
    windows += kernel.to(tl.int64) * (R * S) + cell
    tl.store(windows, total.to(windows.dtype.element_ty), mask=is_kernel & (cell < R * S))


@triton.jit(
    do_not_specialize=["kernels", "elements"],
    do_not_specialize_on_alignment=["weight", "gradient"],
)
def gradients_of_elements(
    weight,
    positions,
    gradient,
    grad_weight,
    grad_positions,
    kernels,
    elements,
    R: constexpr,
    S: constexpr,
):
    """Compute the gradients of weight and positions from that of the windows (N, R, S)."""
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    second = tl.cast(kernels, tl.int64) * elements
    exists = element < second
    y, above_y, _ = place_in_window(positions, element, exists, R)
    x, above_x, _ = place_in_window(positions, second + element, exists, S)
    corner = gradient + element // elements * (R * S) + y * S + x
    top_left = tl.load(corner, mask=exists, other=0.0).to(tl.float32)
    top_right = tl.load(corner + 1, mask=exists, other=0.0).to(tl.float32)
    bottom_left = tl.load(corner + S, mask=exists, other=0.0).to(tl.float32)
    bottom_right = tl.load(corner + S + 1, mask=exists, other=0.0).to(tl.float32)
    store_gradients(
        weight + element,
        grad_weight + element,
        grad_positions + element,
        grad_positions + second + element,
        top_left,
        top_right,
        bottom_left,
        bottom_right,
        above_y,
        above_x,
        exists,
    )


@triton.jit(
    do_not_specialize=["channels", "elements", "taps_down", "taps_across"],
    do_not_specialize_on_alignment=["weight", "positions"],
)
def bank_of_elements(
    weight,
    positions,
    bank,
    clamped,
    channels,
    elements,
    taps_down,
    taps_across,
    R: constexpr,
    S: constexpr,
):
    """Write the matrix of one tap and channel, and, for the first tap, clamped positions (2, C, E).

    It depends on the NEAR x NEAR cells of the window around the tap's offset.
    """
    tap = tl.program_id(0)
    channel = tl.program_id(1)
    near = tl.arange(0, NEAR * NEAR)
    r = (tap // taps_across - taps_down // 2) * SIDE + near // NEAR - (SIDE - 1) + R // 2
    s = (tap % taps_across - taps_across // 2) * SIDE + near % NEAR - (SIDE - 1) + S // 2
    total = tl.zeros((NEAR * NEAR,), dtype=tl.float32)
    for element in range(elements):
        offset = channel * elements + element
        y, above_y, clamped_y = place_in_window(positions, offset, True, R)
        x, above_x, clamped_x = place_in_window(positions, channels * elements + offset, True, S)
        if tap == 0:
            tl.store(clamped + offset, clamped_y)
            tl.store(clamped + channels * elements + offset, clamped_x)
        value = tl.load(weight + offset).to(tl.float32)
        total += value * shares(r, y, above_y) * shares(s, x, above_x)
    entry = tl.arange(0, CELLS * CELLS)
    cell_in = entry // CELLS
    cell_out = entry % CELLS
    down = cell_in // SIDE - cell_out // SIDE + (SIDE - 1)
    across = cell_in % SIDE - cell_out % SIDE + (SIDE - 1)
    matrix = tl.gather(total, down * NEAR + across, 0)
    bank += (channel.to(tl.int64) * (taps_down * taps_across) + tap) * (CELLS * CELLS)
    tl.store(bank + entry, matrix.to(bank.dtype.element_ty))


@triton.jit
def window_gradient(
    partial_sums, r, s, exists, channel, channels, parts, taps_down, taps_across, R, S
):
    """Sum the bank's gradient to that of the window's cells (r, s) of one channel."""
    cell_out = tl.arange(0, CELLS)[None, :]
    row_in = cell_out // SIDE + r[:, None] - R // 2 + taps_down // 2 * SIDE
    column_in = cell_out % SIDE + s[:, None] - S // 2 + taps_across // 2 * SIDE
    exists = exists[:, None] & (row_in >= 0) & (row_in < taps_down * SIDE)
    exists = exists & (column_in >= 0) & (column_in < taps_across * SIDE)
    tap = row_in // SIDE * taps_across + column_in // SIDE
    cell_in = row_in % SIDE * SIDE + column_in % SIDE
    in_bank = (tap * CELLS + cell_in) * CELLS + cell_out
    total = tl.zeros((ELEMENTS_OF_BANK, CELLS), dtype=tl.float32)
    for part in range(parts):
        bank = (part * channels + channel).to(tl.int64) * (taps_down * taps_across)
        total += tl.load(partial_sums + bank * (CELLS * CELLS) + in_bank, mask=exists, other=0.0)
    return tl.sum(total, 1)


@triton.jit(
    do_not_specialize=["channels", "elements", "parts", "taps_down", "taps_across"],
    do_not_specialize_on_alignment=["weight"],
)
def gradients_by_bank(
    weight,
    positions,
    partial_sums,
    grad_weight,
    grad_positions,
    channels,
    elements,
    parts,
    taps_down,
    taps_across,
    R: constexpr,
    S: constexpr,
):
    """Compute the gradients of a channel's elements from partial sums of the bank's gradient."""
    channel = tl.program_id(0)
    element = tl.program_id(1) * ELEMENTS_OF_BANK + tl.arange(0, ELEMENTS_OF_BANK)
    exists = element < elements
    offset = channel * elements + element
    y, above_y, _ = place_in_window(positions, offset, exists, R)
    x, above_x, _ = place_in_window(positions, channels * elements + offset, exists, S)
    top_left = window_gradient(
        partial_sums, y, x, exists, channel, channels, parts, taps_down, taps_across, R, S
    )
    top_right = window_gradient(
        partial_sums, y, x + 1, exists, channel, channels, parts, taps_down, taps_across, R, S
    )
    bottom_left = window_gradient(
        partial_sums, y + 1, x, exists, channel, channels, parts, taps_down, taps_across, R, S
    )
    bottom_right = window_gradient(
        partial_sums, y + 1, x + 1, exists, channel, channels, parts, taps_down, taps_across, R, S
    )
    store_gradients(
        weight + offset,
        grad_weight + offset,
        grad_positions + offset,
        grad_positions + channels * elements + offset,
        top_left,
        top_right,
        bottom_left,
        bottom_right,
        above_y,
        above_x,
        exists,
    )
