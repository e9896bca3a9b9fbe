"""Triton kernels that convolve depthwise in blocks, on a GPU's tensor cores.

A map is cut into blocks of SIDE x SIDE cells. A block of outputs is the sum over the blocks of
inputs around it, each times a Toeplitz matrix that is made of the window. So the depthwise
convolution becomes a small dense convolution of blocks, whose channels are the cells of a block.
The bank holds the matrices: one for each channel and each tap, which is an offset between blocks.

Along one axis, with blocks of 8 cells: a map of 20 cells, x0 to x19, and a window of 5, k0 to k4.

    block 0: x0 to x7        block 1: x8 to x15        block 2: x16 to x19, then zeros

The first output of block 1 is k0 x6 + k1 x7 + k2 x8 + k3 x9 + k4 x10, and the last one needs x17.
So there are three taps: -1, 0 and 1. Windows of up to 17 cells have three, of up to 33 five. In the
matrices, rows u are the inputs of a block, and columns t the outputs:

    tap -1   t0 t1 .. t7      tap 0   t0 t1 t2 t3 t4 t5 t6 t7      tap 1   t0 .. t5 t6 t7
    u0        .  .     .      u0      k2 k1 k0  .  .  .  .  .      u0       .     . k4 k3
    ..                        u1      k3 k2 k1 k0  .  .  .  .      u1       .     .  . k4
    u6       k0  .     .      u2      k4 k3 k2 k1 k0  .  .  .      u2       .     .  .  .
    u7       k1 k0     .      ..                                   ..
                              u7       .  .  .  .  . k4 k3 k2

    An entry is k[8 * tap + u - t + 2], where 2 is half of the window, or 0 beyond the window.

    outputs of block b      sum over taps: inputs of block b + tap, times the matrix of tap
    gradient of inputs      sum over taps: gradients of block b + tap, times the transposed matrix
                            of -tap (TURNED)
    gradient of a matrix    sum over blocks b: inputs of block b + tap, transposed, times the
                            gradients of block b
    gradient of k3          sum over its diagonal in these: (u1, t0) to (u7, t6) of tap 0, and
                            (u0, t7) of tap 1; one entry for each output

On maps, u and t are the 64 cells of a block, row by row, and a tap is an offset down and across.

Axes: C channels, M blocks of all images, `taps`, CELLS cells of a block.

    pack              maps (N, C, H, W), any strides  -> blocks (C, M, CELLS), sums of blocks
    convolve_blocks   blocks, bank, bias              -> blocks of outputs
    pack with UNPACK  blocks                          -> maps
    gradient_of_bank  blocks of inputs and gradients  -> partial sums of the bank's gradient

`element_kernels` makes the bank (C, taps, CELLS, CELLS) from elements, and the elements' gradients
from the bank's gradient.

A matrix of the bank has the inputs' cells as rows and the outputs' as columns.

Sizes of maps are not known to the compiler, so that hardly any new image size needs a compilation.
The cells of a channel, and the numbers of an image, must be fewer than 2**31; larger offsets are
computed with 64 bits. A side of a map has fewer than 2**20 blocks: see `quotient`.

Arguments have no annotations, which Triton would evaluate. They are cast by `tl.cast`: under
torch.compile, a size of 1 becomes a constant, which has no `.to`.
"""

import triton
import triton.language as tl

from .layouts import BLOCK_SIDE

SIDE = tl.constexpr(BLOCK_SIDE)
CELLS = tl.constexpr(BLOCK_SIDE * BLOCK_SIDE)
PACK_CHANNELS = tl.constexpr(64)  # channels that one program of `pack` copies
SUMMED_BLOCKS = tl.constexpr(1024)  # blocks that `gradient_of_bias` adds at once
GATHERED = tl.constexpr(16)  # elements, or cells of a window, whose gradients a program adds up

STRIDES = ["image_stride", "channel_stride", "row_stride", "column_stride"]
MAP_SIZES = ["channels", "rows", "columns", "block_rows", "block_columns", "blocks_in_all"]
BLOCK_SIZES = ["blocks_in_all", "block_rows", "block_columns"]
TAPS = ["taps_down", "taps_across"]


@triton.jit(do_not_specialize=[*STRIDES, *MAP_SIZES])
def pack(
    maps,
    blocks,
    sums,
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
    STEP_DOWN: tl.constexpr,
    STEP_ACROSS: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNELS_ADJACENT: tl.constexpr,
    COLUMNS_ADJACENT: tl.constexpr,
    UNPACK: tl.constexpr,
    SUM: tl.constexpr,
):
    """Copy maps into blocks, or blocks into maps if UNPACK: one block of PACK_CHANNELS channels.

    The maps may hold only every STEP_DOWN-th row and every STEP_ACROSS-th column; the cells between
    them are 0 in the blocks. Strides of maps, and the number of channels, are in units of UNIT: so
    the compiler knows that UNIT divides them. If SUM, each block's cells are added up: sums (C, M).
    """
    block = tl.program_id(0)
    channels *= UNIT
    channel = tl.program_id(1) * PACK_CHANNELS + tl.arange(0, PACK_CHANNELS)
    cell = tl.arange(0, CELLS)
    image = block // (block_rows * block_columns)
    row = (block // block_columns % block_rows) * SIDE + cell // SIDE
    column = (block % block_columns) * SIDE + cell % SIDE
    is_channel = (channel < channels)[:, None]
    exists = (row < rows) & (column < columns)
    exists = exists & (row % STEP_DOWN == 0) & (column % STEP_ACROSS == 0)
    exists = is_channel & exists[None, :]
    row = row // STEP_DOWN
    column = column // STEP_ACROSS
    maps += tl.cast(image, tl.int64) * image_stride * UNIT
    channel_offset = channel if CHANNELS_ADJACENT else channel * (channel_stride * UNIT)
    column_offset = column if COLUMNS_ADJACENT else column * (column_stride * UNIT)
    maps += channel_offset[:, None] + (row * (row_stride * UNIT) + column_offset)[None, :]
    block_of_channel = channel.to(tl.int64) * blocks_in_all + block
    blocks += block_of_channel[:, None] * CELLS + cell[None, :]
    if UNPACK:
        values = tl.load(blocks, mask=exists, other=0.0)
        tl.store(maps, values.to(maps.dtype.element_ty), mask=exists)
    else:
        values = tl.load(maps, mask=exists, other=0.0)
        tl.store(blocks, values.to(blocks.dtype.element_ty), mask=is_channel)
        if SUM:
            total = tl.sum(values.to(tl.float32), 1)
            tl.store(sums + block_of_channel, total, mask=channel < channels)


@triton.jit
def quotient(number, divisor):
    """Return number // divisor, for numbers below 2**20, without a division of integers.

    Rounding moves (number + 0.5) / divisor by less than 2**-21 of itself. This is less than its
    distance from the next integer, which is at least 0.5 / divisor.
    """
    return ((number + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def find_blocks(first, block_rows, block_columns, COUNT: tl.constexpr):
    """Return the rows and columns, in their images, of COUNT blocks from the first one on."""
    column = first % block_columns + tl.arange(0, COUNT)
    rows_below = quotient(column, block_columns)
    row = first // block_columns % block_rows + rows_below
    return row - quotient(row, block_rows) * block_rows, column - rows_below * block_columns


@triton.jit
def is_below(number, limit):
    """Return whether 0 <= number < limit, by one comparison."""
    return number.to(tl.uint32) < tl.cast(limit, tl.uint32)


@triton.jit(
    do_not_specialize=[*BLOCK_SIZES, *TAPS],
    do_not_specialize_on_alignment=["bias"],
)
def convolve_blocks(
    blocks,
    bank,
    bias,
    outputs,
    blocks_in_all,
    block_rows,
    block_columns,
    taps_down,
    taps_across,
    HAS_BIAS: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Convolve BLOCKS blocks of one channel with the bank, in steps of STEP cells of the inputs.

    If TURNED, as for the gradient of the input, each tap uses the transposed matrix of the mirrored
    tap.
    """
    channel = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCKS
    row, column = find_blocks(first, block_rows, block_columns, BLOCKS)
    block = first + tl.arange(0, BLOCKS)
    row = tl.where(block < blocks_in_all, row, -65536)  # a row that no map has
    cell = tl.arange(0, CELLS)
    cell_in = tl.arange(0, STEP)
    taps = taps_down * taps_across
    blocks += channel * blocks_in_all * CELLS
    bank += channel * taps * (CELLS * CELLS)
    inputs_at = blocks + block[:, None] * CELLS + cell_in[None, :]
    down = -(taps_down // 2)
    across = -(taps_across // 2)
    total = tl.zeros((BLOCKS, CELLS), dtype=tl.float32)
    for step in range(taps * (CELLS // STEP)):
        tap = step // (CELLS // STEP)
        first_cell = (step - tap * (CELLS // STEP)) * STEP
        exists = is_below(row + down, block_rows) & is_below(column + across, block_columns)
        neighbour = (down * block_columns + across) * CELLS + first_cell
        inputs = tl.load(inputs_at + neighbour, mask=exists[:, None], other=0.0)
        if TURNED:
            mirrored = bank + (taps - 1 - tap) * (CELLS * CELLS) + first_cell
            matrix = tl.trans(tl.load(mirrored + cell[:, None] * CELLS + cell_in[None, :]))
        else:
            matrix = bank + (tap * CELLS + first_cell) * CELLS
            matrix = tl.load(matrix + cell_in[:, None] * CELLS + cell[None, :])
        total = tl.dot(inputs, matrix, total, input_precision=PRECISION)
        # Not by `if`, which would keep ptxas from overlapping the products of tensor cores.
        across += (first_cell + STEP) // CELLS  # 1 after a whole tap
        is_past = across > taps_across // 2
        down = tl.where(is_past, down + 1, down)
        across = tl.where(is_past, -(taps_across // 2), across)
    if HAS_BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    outputs += channel * blocks_in_all * CELLS
    tl.store(
        outputs + block[:, None] * CELLS + cell[None, :],
        total.to(outputs.dtype.element_ty),
        mask=(block < blocks_in_all)[:, None],
    )


@triton.jit(do_not_specialize=["channels", "blocks_in_part", *BLOCK_SIZES, *TAPS])
def gradient_of_bank(
    blocks,
    gradients,
    partial_sums,
    channels,
    blocks_in_part,
    blocks_in_all,
    block_rows,
    block_columns,
    taps_down,
    taps_across,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    THREE: tl.constexpr,
):
    """Sum inputs x gradients over a part of the blocks, in steps of STEP, for one channel.

    A program does one tap; if THREE, it does the three taps of a row, for a single load of the
    gradients. partial_sums is (parts, C, taps, CELLS of inputs, CELLS of outputs).
    """
    tap = tl.program_id(0)
    channel = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    cell = tl.arange(0, CELLS)[None, :]
    if THREE:
        tap = 3 * tap + 1
    down = tap // taps_across - taps_down // 2
    across = 0 if THREE else tap % taps_across - taps_across // 2
    first = part * blocks_in_part
    end = min(first + blocks_in_part, blocks_in_all)
    row, column = find_blocks(first, block_rows, block_columns, STEP)
    rows_in_step = STEP // block_columns % block_rows
    columns_in_step = STEP % block_columns
    blocks += (channel * blocks_in_all + down * block_columns + across) * CELLS
    gradients += channel * blocks_in_all * CELLS
    total = tl.zeros((CELLS, CELLS), dtype=tl.float32)
    if THREE:
        left = tl.zeros((CELLS, CELLS), dtype=tl.float32)
        right = tl.zeros((CELLS, CELLS), dtype=tl.float32)
    for start in range(first, end, STEP):
        block = start + tl.arange(0, STEP)
        in_part = block < end
        row_exists = in_part & is_below(row + down, block_rows)
        exists = row_exists & is_below(column + across, block_columns)
        offset = block[:, None] * CELLS + cell
        gradient = tl.load(gradients + offset, mask=in_part[:, None], other=0.0)
        total = add_products(total, blocks + offset, exists, gradient, PRECISION)
        if THREE:
            exists = row_exists & (column > 0)
            left = add_products(left, blocks - CELLS + offset, exists, gradient, PRECISION)
            exists = row_exists & (column < block_columns - 1)
            right = add_products(right, blocks + CELLS + offset, exists, gradient, PRECISION)
        # Go on to the blocks after these, which may be in the next row, or in the next image.
        column += columns_in_step
        wraps = column >= block_columns
        column = tl.where(wraps, column - block_columns, column)
        row += rows_in_step + wraps.to(tl.int32)
        row = tl.where(row >= block_rows, row - block_rows, row)
    matrix = (part * channels + channel) * (taps_down * taps_across) + tap
    partial_sums += (matrix * CELLS + tl.arange(0, CELLS)[:, None]) * CELLS + cell
    tl.store(partial_sums, total)
    if THREE:
        tl.store(partial_sums - CELLS * CELLS, left)
        tl.store(partial_sums + CELLS * CELLS, right)


@triton.jit
def add_products(total, inputs_at, exists, gradient, PRECISION: tl.constexpr):
    """Add a sum of products (CELLS of inputs, CELLS of outputs) over some blocks to a total."""
    inputs = tl.load(inputs_at, mask=exists[:, None], other=0.0)
    return tl.dot(tl.trans(inputs), gradient, total, input_precision=PRECISION)


@triton.jit
def gradient_of_bias(sums, grad_bias, channel, blocks_in_all):
    """Add up the sums of a channel's blocks of gradients, and store the bias's gradient."""
    sums += tl.cast(channel, tl.int64) * blocks_in_all
    total = tl.zeros((SUMMED_BLOCKS,), dtype=tl.float32)
    for first in range(0, blocks_in_all, SUMMED_BLOCKS):
        block = first + tl.arange(0, SUMMED_BLOCKS)
        total += tl.load(sums + block, mask=block < blocks_in_all, other=0.0)
    tl.store(grad_bias + channel, tl.sum(total))


@triton.jit
def sum_diagonals(partial_sums, r, s, exists, channel, sizes, R, S):
    """Return the gradients of GATHERED cells (r, s) of one channel's window.

    A cell of the window is a diagonal of the bank's matrices, with one entry for each output cell.
    Its gradient is the sum of the bank's gradient over this diagonal.
    """
    channels, parts, taps_down, taps_across = sizes
    cell_out = tl.arange(0, CELLS)[None, :]
    row_in = cell_out // SIDE + r[:, None] - R // 2 + taps_down // 2 * SIDE
    column_in = cell_out % SIDE + s[:, None] - S // 2 + taps_across // 2 * SIDE
    exists = exists[:, None] & (row_in >= 0) & (row_in < taps_down * SIDE)
    exists = exists & (column_in >= 0) & (column_in < taps_across * SIDE)
    tap = row_in // SIDE * taps_across + column_in // SIDE
    cell_in = row_in % SIDE * SIDE + column_in % SIDE
    in_bank = (tap * CELLS + cell_in) * CELLS + cell_out
    total = tl.zeros((GATHERED, CELLS), dtype=tl.float32)
    for part in range(parts):
        bank = (part * channels + channel).to(tl.int64) * (taps_down * taps_across)
        total += tl.load(partial_sums + bank * (CELLS * CELLS) + in_bank, mask=exists, other=0.0)
    return tl.sum(total, 1)
