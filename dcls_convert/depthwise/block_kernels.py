"""Triton kernels that convolve depthwise in blocks, on a GPU's tensor cores.

A map is cut into blocks of SIDE x SIDE cells. A block of outputs is the sum over the blocks of
inputs around it, each times a Toeplitz matrix that is made of the window. So the depthwise
convolution becomes a small dense convolution of blocks, whose channels are the cells of a block.
The bank holds the matrices: one for each channel and each tap, which is an offset between blocks.

Axes: C channels, M blocks of all images, `taps`, CELLS cells of a block.

    pack               maps (N, C, H, W), any strides  -> blocks (C, M, CELLS)
    bank_of_window     window (C, R, S)                -> bank (C, taps, CELLS, CELLS)
    convolve_blocks    blocks, bank, bias              -> blocks of outputs
    pack with UNPACK   blocks                          -> maps
    gradient_of_bank   blocks of inputs and gradients  -> partial sums of the bank's gradient
    diagonals          partial sums                    -> the window's gradient

A matrix of the bank has the inputs' cells as rows and the outputs' as columns.

Sizes of maps are not known to the compiler, so that a new image size needs no compilation. The
cells of a channel, and the numbers of an image, must be fewer than 2**31; larger
offsets are computed with 64 bits.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from .layouts import BLOCK_SIDE

SIDE = constexpr(BLOCK_SIDE)
CELLS = constexpr(BLOCK_SIDE * BLOCK_SIDE)
PACK_CHANNELS = constexpr(64)  # of one program of `pack`

_MAP_SIZES = ["channels", "rows", "columns", "block_rows", "block_columns", "blocks_in_all"]
_STRIDES = ["image_stride", "channel_stride", "row_stride", "column_stride"]
_TAPS = ["taps_down", "taps_across"]


@triton.jit(do_not_specialize=[*_STRIDES, *_MAP_SIZES])
def pack(
    maps,
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
    STEP_DOWN: constexpr,
    STEP_ACROSS: constexpr,
    UNIT: constexpr,
    CHANNELS_ADJACENT: constexpr,
    COLUMNS_ADJACENT: constexpr,
    UNPACK: constexpr,
):
    """Copy maps into blocks, or back if UNPACK: one block of PACK_CHANNELS channels.

    Maps may have only each STEP_DOWN-th row and each STEP_ACROSS-th column; in blocks, cells that
    the maps do not have are 0. Strides of maps, and the number of channels, are in units
    of UNIT, which tells the compiler what divides them.
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
    maps += image.to(tl.int64) * image_stride * UNIT
    in_channel = channel if CHANNELS_ADJACENT else channel * (channel_stride * UNIT)
    in_row = column if COLUMNS_ADJACENT else column * (column_stride * UNIT)
    maps += in_channel[:, None] + (row * (row_stride * UNIT) + in_row)[None, :]
    blocks += (channel.to(tl.int64) * blocks_in_all + block)[:, None] * CELLS + cell[None, :]
    if UNPACK:
        values = tl.load(blocks, mask=exists, other=0.0)
        tl.store(maps, values.to(maps.dtype.element_ty), mask=exists)
    else:
        values = tl.load(maps, mask=exists, other=0.0)
        tl.store(blocks, values.to(blocks.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=_TAPS, do_not_specialize_on_alignment=["window"])
def bank_of_window(window, bank, taps_down, taps_across, R: constexpr, S: constexpr):
    """Write the matrix of one tap and channel.

    Its entry for an input cell and an output cell is the window's cell at their distance.
    """
    tap = tl.program_id(0)
    channel = tl.program_id(1)
    cell_in = tl.arange(0, CELLS)[:, None]
    cell_out = tl.arange(0, CELLS)[None, :]
    down = (tap // taps_across - taps_down // 2) * SIDE + cell_in // SIDE - cell_out // SIDE
    across = (tap % taps_across - taps_across // 2) * SIDE + cell_in % SIDE - cell_out % SIDE
    r = down + R // 2
    s = across + S // 2
    is_in_window = (r >= 0) & (r < R) & (s >= 0) & (s < S)
    values = tl.load(window + channel * (R * S) + r * S + s, mask=is_in_window, other=0.0)
    matrix = bank + (channel.to(tl.int64) * (taps_down * taps_across) + tap) * (CELLS * CELLS)
    tl.store(matrix + cell_in * CELLS + cell_out, values.to(bank.dtype.element_ty))


@triton.jit(
    do_not_specialize=["blocks_in_all", "block_rows", "block_columns", *_TAPS],
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
    HAS_BIAS: constexpr,
    TURNED: constexpr,
    PRECISION: constexpr,
    BLOCKS: constexpr,
    STEP: constexpr,
):
    """Convolve BLOCKS blocks of one channel with the bank, in steps of STEP cells of the inputs.

    If TURNED, the window is turned by 180 degrees, as for the gradient of the input: its matrices
    are those of the mirrored tap, transposed.
    """
    channel = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    cell = tl.arange(0, CELLS)
    taps = taps_down * taps_across
    row = block // block_columns % block_rows
    column = block % block_columns
    blocks += channel * blocks_in_all * CELLS
    bank += channel * taps * (CELLS * CELLS)
    total = tl.zeros((BLOCKS, CELLS), dtype=tl.float32)
    for first in range(0, taps * CELLS, STEP):
        tap = first // CELLS
        cell_in = first - tap * CELLS + tl.arange(0, STEP)
        down = tap // taps_across - taps_down // 2
        across = tap % taps_across - taps_across // 2
        exists = (block < blocks_in_all) & (row + down >= 0) & (row + down < block_rows)
        exists = exists & (column + across >= 0) & (column + across < block_columns)
        neighbour = block + down * block_columns + across
        inputs = tl.load(
            blocks + neighbour[:, None] * CELLS + cell_in[None, :], mask=exists[:, None], other=0.0
        )
        if TURNED:
            mirrored = bank + (taps - 1 - tap) * (CELLS * CELLS)
            matrix = tl.trans(tl.load(mirrored + cell[:, None] * CELLS + cell_in[None, :]))
        else:
            matrix = tl.load(bank + (tap * CELLS + cell_in[:, None]) * CELLS + cell[None, :])
        total = tl.dot(inputs, matrix, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    outputs += channel * blocks_in_all * CELLS
    tl.store(
        outputs + block[:, None] * CELLS + cell[None, :],
        total.to(outputs.dtype.element_ty),
        mask=(block < blocks_in_all)[:, None],
    )


@triton.jit(
    do_not_specialize=[
        "channels",
        "blocks_in_all",
        "blocks_in_part",
        "block_rows",
        "block_columns",
        *_TAPS,
    ]
)
def gradient_of_bank(
    blocks,
    gradients,
    partial_sums,
    channels,
    blocks_in_all,
    blocks_in_part,
    block_rows,
    block_columns,
    taps_down,
    taps_across,
    PRECISION: constexpr,
    STEP: constexpr,
):
    """Sum inputs x gradients over a part of the blocks, in steps of STEP, for one tap and channel.

    partial_sums is (parts, C, taps, CELLS of inputs, CELLS of outputs).
    """
    tap = tl.program_id(0)
    channel = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    cell = tl.arange(0, CELLS)
    down = tap // taps_across - taps_down // 2
    across = tap % taps_across - taps_across // 2
    blocks += channel * blocks_in_all * CELLS
    gradients += channel * blocks_in_all * CELLS
    total = tl.zeros((CELLS, CELLS), dtype=tl.float32)
    first = part * blocks_in_part
    for start in range(first, min(first + blocks_in_part, blocks_in_all), STEP):
        block = start + tl.arange(0, STEP)
        row = block // block_columns % block_rows + down
        column = block % block_columns + across
        exists = (block < blocks_in_all) & (row >= 0) & (row < block_rows)
        exists = exists & (column >= 0) & (column < block_columns)
        neighbour = block + down * block_columns + across
        inputs = tl.load(
            blocks + neighbour[:, None] * CELLS + cell[None, :], mask=exists[:, None], other=0.0
        )
        gradient = tl.load(
            gradients + block[:, None] * CELLS + cell[None, :],
            mask=(block < blocks_in_all)[:, None],
            other=0.0,
        )
        total = tl.dot(tl.trans(inputs), gradient, total, input_precision=PRECISION)
    matrix = (part * channels + channel) * (taps_down * taps_across) + tap
    offsets = (matrix * CELLS + cell[:, None]) * CELLS + cell[None, :]
    tl.store(partial_sums + offsets, total)


@triton.jit(do_not_specialize=["channels", "parts", *_TAPS])
def diagonals(
    partial_sums,
    gradient,
    channels,
    parts,
    taps_down,
    taps_across,
    R: constexpr,
    S: constexpr,
    S_PADDED: constexpr,
):
    """Sum the bank's gradient to one row of one channel's window: (C, R, S).

    A cell of the window is on a diagonal of the matrices: it has an entry for each output cell.
    """
    r = tl.program_id(0)
    channel = tl.program_id(1)
    s = tl.arange(0, S_PADDED)[None, :]
    cell_out = tl.arange(0, CELLS)[:, None]
    row_in = cell_out // SIDE + r - R // 2 + taps_down // 2 * SIDE
    column_in = cell_out % SIDE + s - S // 2 + taps_across // 2 * SIDE
    exists = (s < S) & (row_in >= 0) & (row_in < taps_down * SIDE)
    exists = exists & (column_in >= 0) & (column_in < taps_across * SIDE)
    tap = row_in // SIDE * taps_across + column_in // SIDE
    cell_in = row_in % SIDE * SIDE + column_in % SIDE
    in_bank = (tap * CELLS + cell_in) * CELLS + cell_out
    total = tl.zeros((CELLS, S_PADDED), dtype=tl.float32)
    for part in range(parts):
        bank = (part * channels + channel).to(tl.int64) * (taps_down * taps_across)
        total += tl.load(partial_sums + bank * (CELLS * CELLS) + in_bank, mask=exists, other=0.0)
    s = tl.arange(0, S_PADDED)
    offsets = channel * (R * S) + r * S + s
    tl.store(gradient + offsets, tl.sum(total, 0).to(gradient.dtype.element_ty), mask=s < S)
