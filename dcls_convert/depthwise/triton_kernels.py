"""Kernels in Triton for depthwise convolution as matrix products, which GPUs have hardware for.

Axes: N images, C channels, H x W an input map, R x S the window. A program works on one channel, and on patches of
ROWS x COLUMNS outputs. Let (y, j) be a cell of such a patch, and (i, k) a cell of the input that the patch sees:

    output[n, (y, j)] = sum over (i, k) of input[n, (i, k)] * bank[(i, k), (y, j)]
    bank[(i, k), (y, j)] = window[i - y, k - j - lead], zero outside of the window: a Toeplitz matrix

The gradient of the window is that of the bank, input^T @ gradient, summed over its diagonals.

Loads are 16 bytes wide: rows of maps have a multiple of 8 cells, and the columns that a patch sees start at a multiple
of 8, `lead` columns before the window's first. Multiples of 8 are passed as numbers of eights, so that the compiler
knows them. Sizes are arguments, not constants: one kernel serves all maps.

A value that is not finite makes NaN of all outputs whose patch sees it, since the bank's zeros multiply it too.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
import triton
import triton.language as tl


@triton.jit
def copy_maps(
    x_ptr, y_ptr, C, H, W, xn, xc, xh, xw, yn, yc, yh, yw, units,
    UNIT: tl.constexpr, CHANNELS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """y (N, C, H, units * UNIT) = x (N, C, H, W), from any strides to any; zeros in the columns from W on."""
    width = units * UNIT
    cell_blocks, channel_blocks = tl.cdiv(H * width, CELLS), tl.cdiv(C, CHANNELS)
    block, n = tl.program_id(0) % (cell_blocks * channel_blocks), tl.program_id(0) // (cell_blocks * channel_blocks)
    c = ((block // cell_blocks) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)[:, None]
    cell = ((block % cell_blocks) * CELLS + tl.arange(0, CELLS))[None, :]
    row, column = (cell // width).to(tl.int64), (cell % width).to(tl.int64)
    inside = (c < C) & (row < H)
    value = tl.load(
        x_ptr + n.to(tl.int64) * xn + c * xc + row * xh + column * xw, mask=inside & (column < W), other=0.0
    )
    tl.store(y_ptr + n.to(tl.int64) * yn + c * yc + row * yh + column * yw, value, mask=inside)


@triton.jit
def make_bank(
    window_ptr, bank_ptr, R, S, lead,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bank (C, SEEN, R + 2 * (ROWS - 1), COLUMNS) of windows (C, R, S): [c, k, ROWS - 1 + R - 1 - r, j].

    Rows are reversed, so that the ROWS rows that meet one row of the input lie one after another.
    """
    bank_rows = R + 2 * (ROWS - 1)
    size = SEEN * bank_rows * COLUMNS
    blocks = tl.cdiv(size, BLOCK)
    c = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    j, row, k = at % COLUMNS, (at // COLUMNS) % bank_rows, at // (COLUMNS * bank_rows)
    r, s = ROWS - 1 + R - 1 - row, k - j - lead
    inside = (r >= 0) & (r < R) & (s >= 0) & (s < S)
    value = tl.load(window_ptr + c * (R * S) + r * S + s, mask=inside & (at < size), other=0.0)
    tl.store(bank_ptr + c * size + at, value, mask=at < size)


@triton.jit
def convolve(
    x_ptr, bank_ptr, bias_ptr, y_ptr, N, C, H, width8, out_rows, out_units, pad_rows, shift8, R,
    HAS_BIAS: tl.constexpr, UNIT: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y (N, C, out_rows, out_units * UNIT) of x (N, C, H, width8 * 8); a patch sees CHUNKS * CHUNK columns.

    One product for each row of the input that is in the map: (IMAGES, CHUNK) @ (CHUNK, ROWS * COLUMNS).
    """
    width, out_width = width8 * 8, out_units * UNIT
    across, down, image_blocks = tl.cdiv(out_width, COLUMNS), tl.cdiv(out_rows, ROWS), tl.cdiv(N, IMAGES)
    patch, rest = tl.program_id(0) % (across * down), tl.program_id(0) // (across * down)
    c = (rest // image_blocks).to(tl.int64)
    n = (rest % image_blocks) * IMAGES + tl.arange(0, IMAGES)
    top, left = (patch // across) * ROWS, (patch % across) * COLUMNS
    k, cell = tl.arange(0, CHUNK), tl.arange(0, ROWS * COLUMNS)

    bank_column = (R + 2 * (ROWS - 1)) * COLUMNS
    maps = x_ptr + (tl.minimum(n, N - 1).to(tl.int64) * C + c)[:, None] * (H * width)
    bank = bank_ptr + c * (CHUNKS * CHUNK * bank_column) + k[:, None] * bank_column + cell[None, :]
    total = tl.zeros((IMAGES, ROWS * COLUMNS), tl.float32)
    for step in range(max(0, top - pad_rows) * CHUNKS, min(H, top - pad_rows + ROWS - 1 + R) * CHUNKS):
        row, first = step // CHUNKS, (step % CHUNKS) * CHUNK
        column = left - shift8 * 8 + first + k
        x = tl.load(maps + (row * width + column)[None, :], mask=((column >= 0) & (column < width))[None, :], other=0.0)
        reversed_row = ROWS - 1 + R - 1 - (row - top + pad_rows)
        weights = tl.load(bank + first * bank_column + reversed_row * COLUMNS)
        total = tl.dot(x, weights, total, input_precision=PRECISION)

    if HAS_BIAS:
        total += tl.load(bias_ptr + c).to(tl.float32)
    row, column = top + cell // COLUMNS, left + cell % COLUMNS
    out = y_ptr + (n.to(tl.int64) * C + c)[:, None] * (out_rows * out_width) + (row * out_width + column)[None, :]
    inside = (n < N)[:, None] & ((row < out_rows) & (column < out_width))[None, :]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def correlate(
    x_ptr, g_ptr, part_ptr, N, C, H, width8, out_rows, out_width8, pad_rows, shift8, lead, blocks, splits,
    IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEEN_ROWS: tl.constexpr, SEEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """part (splits, C, blocks * SEEN_ROWS, SEEN, ROWS): [split, c, i, s, y] is what row y of the patches adds to
    window[i - y, s], summed over the split's patches and images. No two programs write to one place.

    A program has SEEN_ROWS rows of the bank's gradient: products (SEEN_ROWS * SEEN, IMAGES) @ (IMAGES, ROWS * COLUMNS)
    over all patches that see a row of the map through them. x is (N, C, H, width8 * 8), g the output's gradient
    (N, C, out_rows, out_width8 * 8).
    """
    width, out_width = width8 * 8, out_width8 * 8
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    c, split = (rest % C).to(tl.int64), rest // C
    image = tl.arange(0, IMAGES)
    seen, cell = tl.arange(0, SEEN_ROWS * SEEN), tl.arange(0, ROWS * COLUMNS)
    i, k = block * SEEN_ROWS + seen // SEEN, seen % SEEN
    y, j = cell // COLUMNS, cell % COLUMNS

    above = block * SEEN_ROWS - pad_rows  # row of the map that the patch at the top sees first
    first_down = max(0, ROWS - SEEN_ROWS - above) // ROWS  # patches above it see the padding alone
    end_down = min(tl.cdiv(out_rows, ROWS), tl.cdiv(max(0, H - above), ROWS))
    across = tl.cdiv(out_width, COLUMNS)
    patches = max(0, end_down - first_down) * across
    steps = patches * tl.cdiv(N, IMAGES)
    share = tl.cdiv(steps, splits)
    divisor = max(1, patches)  # the compiler divides once before it asks whether there is a step
    plane = image.to(tl.int64) * C + c
    maps = x_ptr + plane[None, :] * (H * width) + ((i - pad_rows) * width + k - shift8 * 8)[:, None]
    grads = g_ptr + plane[:, None] * (out_rows * out_width) + (y * out_width + j)[None, :]
    total = tl.zeros((SEEN_ROWS * SEEN, ROWS * COLUMNS), tl.float32)
    for step in range(split * share, min(steps, split * share + share)):
        n, patch = (step // divisor) * IMAGES, step % divisor
        top, left = (first_down + patch // across) * ROWS, (patch % across) * COLUMNS
        first_plane = n.to(tl.int64) * C
        row, column = top + i - pad_rows, left - shift8 * 8 + k
        seen_map = (row >= 0) & (row < H) & (column >= 0) & (column < width)
        x = tl.load(
            maps + (first_plane * (H * width) + top * width + left),
            mask=seen_map[:, None] & (image < N - n)[None, :],
            other=0.0,
        )
        in_output = (y < out_rows - top) & (j < out_width - left)
        g = tl.load(
            grads + (first_plane * (out_rows * out_width) + top * out_width + left),
            mask=(image < N - n)[:, None] & in_output[None, :],
            other=0.0,
        )
        total = tl.dot(x, g, total, input_precision=PRECISION)

    # Column j moves up by j + lead, so that a diagonal k - j = s + lead becomes a row s; rows from S on hold nothing.
    diagonal = (seen - k)[:, None] + tl.minimum(k[:, None] + j[None, :] + lead, SEEN - 1)
    sums = tl.sum(tl.reshape(tl.gather(total, diagonal, 0), (SEEN_ROWS * SEEN, ROWS, COLUMNS)), 2)
    part = part_ptr + ((split * C + c) * blocks + block) * (SEEN_ROWS * SEEN * ROWS)
    tl.store(part + seen[:, None] * ROWS + tl.arange(0, ROWS)[None, :], sums)
