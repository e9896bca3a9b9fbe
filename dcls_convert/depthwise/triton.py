"""Depthwise convolution on GPUs by the kernels of `triton_kernels`, as operations that torch knows and can trace.

Axes: N images, C channels, H x W an input map, R x S the window. Stride and dilation are 1, each channel has one
window, and padding is (rows, columns) of zeros on either side; where it is negative, the map is cut. Dtypes are
float16, bfloat16, and float32 in the precision of TF32. Sums are float32, in a fixed order, so that every run gives the
same bits.

Triton is imported when an operation runs, not before. With TRITON_INTERPRET=1 it runs on CPU tensors, for tests.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

ALIGNMENT = 8  # cells: 16 bytes in half precision, the widest load
ROWS = 8  # of outputs in a patch
CHUNK = 32  # columns of the input in one product
COPIED = 64  # channels and cells that a program copies
BLOCK = 1024  # numbers of a bank that a program writes
PROGRAMS = 1024  # of the weight's gradient, at least where there is work for them; several for each processor of a GPU


def convolve_config(dtype: torch.dtype, batch: int, output_columns: int, columns: int, pad: int) -> dict[str, Any]:
    """Tile sizes and launch options of `triton_kernels.convolve` for a window of `columns` cells in a row.

    Chosen by sizes alone and never by timing: deterministic, and safe while a CUDA graph is captured.
    """
    patch = _patch_columns(output_columns)
    images = _images(batch, most=64 if dtype == torch.float32 else 128)
    chunks = _blocks(_seen_columns(patch, columns, pad), CHUNK)
    tile = {"IMAGES": images, "ROWS": ROWS, "COLUMNS": patch, "CHUNKS": chunks, "CHUNK": CHUNK}
    return {**tile, "PRECISION": _precision(dtype), "num_warps": 8 if images * patch > 1024 else 4, "num_stages": 3}


def correlate_config(dtype: torch.dtype, batch: int, output_columns: int, columns: int, pad: int) -> dict[str, Any]:
    """As `convolve_config`, for `triton_kernels.correlate`."""
    patch = _patch_columns(output_columns)
    images = _images(batch, most=32 if dtype == torch.float32 else 64)
    seen = max(32, _power_of_2(_seen_columns(patch, columns, pad)))
    tile = {"IMAGES": images, "ROWS": ROWS, "COLUMNS": patch, "SEEN": seen, "SEEN_ROWS": max(1, 128 // seen)}
    return {**tile, "PRECISION": _precision(dtype), "num_warps": 8 if patch == 16 else 4, "num_stages": 3}


def _precision(dtype: torch.dtype) -> str:
    """In which float32 is multiplied; ROCm has no TF32 on most GPUs, and no need of it."""
    return "tf32" if dtype == torch.float32 and torch.version.hip is None else "ieee"


def _patch_columns(output_columns: int) -> int:
    return 16 if output_columns > 8 else 8


def _images(batch: int, most: int) -> int:
    return min(most, max(16, _power_of_2(batch)))  # tensor cores take 16 at least


def _seen_columns(patch: int, columns: int, pad: int) -> int:
    return patch + columns - 1 + _lead(pad)


def _lead(pad: int) -> int:
    """Columns that a patch sees before its window's first, so that they start at a multiple of ALIGNMENT."""
    return -pad % ALIGNMENT


def _shift(pad: int) -> int:
    """Eights of columns by which a patch's first output is right of the first column that the patch sees."""
    return (pad + _lead(pad)) // ALIGNMENT


def _unit(width: int) -> int:
    return ALIGNMENT if width % ALIGNMENT == 0 else 1


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _power_of_2(number: int) -> int:
    """The least power of 2 that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _output_size(input: Tensor, kernel: Tensor, bias: Tensor | None, padding: Sequence[int]) -> tuple[int, int]:
    """Also refuses what would make the kernels read beyond their tensors, or on another GPU."""
    channels, given = input.shape[1:2], [input, kernel] if bias is None else [input, kernel, bias]
    fits = kernel.shape[:2] == (*channels, 1) and (bias is None or bias.shape == channels)
    if not fits:
        raise RuntimeError("kernel and bias must have one window and one number for each channel of the input")
    if len({tensor.device for tensor in given}) > 1:
        raise RuntimeError("all tensors must be on one device")
    sizes = zip(input.shape[2:], padding, kernel.shape[2:], strict=True)
    rows, columns = (side + 2 * pad - size + 1 for side, pad, size in sizes)
    if rows <= 0 or columns <= 0:
        raise RuntimeError("the window is larger than the padded input")
    return rows, columns


def is_channels_last(maps: Tensor) -> bool:
    """Whether maps (N, C, H, W), or slices of them, have that memory format and no other."""
    # Asked one by one: for torch.compile, both at once would be a symbol, and no argument for functions of constants.
    if maps.stride(1) != 1:
        return False
    return not maps.is_contiguous()


@torch.library.custom_op("dcls_convert::depthwise", mutates_args=())
def depthwise(input: Tensor, kernel: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """input (N, C, H, W), kernel (C, 1, R, S), bias (C) -> (N, C, H', W') in the input's memory format; one dtype."""
    from .triton_kernels import convolve

    batch, channels, height, _ = input.shape
    rows, columns = _output_size(input, kernel, bias, padding)
    config = convolve_config(input.dtype, batch, columns, kernel.shape[-1], padding[1])
    maps, bank = _aligned(input), _bank(kernel, padding[1], config)
    output = input.new_empty(batch, channels, rows, columns)
    unit = _unit(columns)
    _launch(
        convolve,
        channels * _blocks(rows, ROWS) * _blocks(columns, config["COLUMNS"]) * _blocks(batch, config["IMAGES"]),
        *(maps, bank, bank if bias is None else bias.contiguous(), output, batch, channels, height),
        *(maps.shape[-1] // ALIGNMENT, rows, columns // unit, padding[0], _shift(padding[1]), kernel.shape[2]),
        HAS_BIAS=bias is not None,
        UNIT=unit,
        **config,
    )
    if is_channels_last(input):
        return _copied(output, torch.empty_like(output, memory_format=torch.channels_last))
    return output


@torch.library.custom_op("dcls_convert::depthwise_kernel_gradient", mutates_args=())
def depthwise_kernel_gradient(input: Tensor, grad: Tensor, padding: Sequence[int]) -> Tensor:
    """input (N, C, H, W), the output's gradient (N, C, H', W') -> the kernel's gradient (C, 1, R, S)."""
    from .triton_kernels import correlate

    batch, channels, height, _ = input.shape
    rows, columns = _kernel_size(input, grad, padding)
    config = correlate_config(input.dtype, batch, grad.shape[-1], columns, padding[1])
    blocks = _blocks(rows + ROWS - 1, config["SEEN_ROWS"])
    patches = _blocks(grad.shape[2], ROWS) * _blocks(grad.shape[3], config["COLUMNS"])
    splits = max(1, min(patches * _blocks(batch, config["IMAGES"]), PROGRAMS // (channels * blocks)))
    shape = splits, channels, blocks * config["SEEN_ROWS"], config["SEEN"], ROWS
    part = input.new_empty(shape, dtype=torch.float32)
    maps, grads = _aligned(input), _aligned(grad)
    _launch(
        correlate,
        blocks * channels * splits,
        *(maps, grads, part, batch, channels, height, maps.shape[-1] // ALIGNMENT),
        *(grad.shape[2], grads.shape[-1] // ALIGNMENT, padding[0], _shift(padding[1]), _lead(padding[1])),
        *(blocks, splits),
        **config,
    )
    total = part.sum(0)  # [c, i, s, y] belongs to row i - y of the window
    channel, row, column, _ = total.stride()
    diagonals = total.as_strided((channels, rows, columns, ROWS), (channel, row, column, row + 1))  # [c, i - y, s, y]
    return diagonals.sum(-1).unsqueeze(1).to(input.dtype)


def _kernel_size(input: Tensor, grad: Tensor, padding: Sequence[int]) -> tuple[int, int]:
    sizes = zip(input.shape[2:], padding, grad.shape[2:], strict=True)
    rows, columns = (side + 2 * pad - output + 1 for side, pad, output in sizes)
    return rows, columns


def _aligned(maps: Tensor) -> Tensor:
    """Maps (N, C, H, W), contiguous, their rows filled up with zeros to a multiple of ALIGNMENT cells."""
    *sizes, width = maps.shape
    if maps.is_contiguous() and width % ALIGNMENT == 0:
        return maps
    return _copied(maps, maps.new_empty(*sizes, _blocks(width, ALIGNMENT) * ALIGNMENT))


def _copied(maps: Tensor, copy: Tensor) -> Tensor:
    """`copy` (N, C, H, W'), filled with maps (N, C, H, W) and zeros."""
    from .triton_kernels import copy_maps

    batch, channels, height, width = copy.shape
    _launch(
        copy_maps,
        batch * _blocks(channels, COPIED) * _blocks(height * width, COPIED),
        *(maps, copy, channels, height, maps.shape[-1], *maps.stride(), *copy.stride(), width // _unit(width)),
        UNIT=_unit(width),
        CHANNELS=COPIED,
        CELLS=COPIED,
        num_warps=8,
    )
    return copy


def _bank(kernel: Tensor, pad: int, config: dict[str, Any]) -> Tensor:
    """Windows (C, 1, R, S) as the matrices by which `convolve` multiplies."""
    from .triton_kernels import make_bank

    channels, _, rows, columns = kernel.shape
    sizes = {"ROWS": ROWS, "COLUMNS": config["COLUMNS"], "SEEN": config["CHUNKS"] * CHUNK}
    bank = kernel.new_empty(channels, sizes["SEEN"], rows + 2 * (ROWS - 1), sizes["COLUMNS"])
    programs = channels * _blocks(bank.numel() // channels, BLOCK)
    _launch(make_bank, programs, kernel.contiguous(), bank, rows, columns, _lead(pad), **sizes, BLOCK=BLOCK)
    return bank


def _launch(kernel: Any, programs: int, *arguments: Any, **config: Any) -> None:
    # Triton 3.9 warns where this option is left open, since its default will change.
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[(programs,)](*arguments, enable_fp_fusion=True, **config)


@depthwise.register_fake
def _(input: Tensor, kernel: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    output = input.new_empty(*input.shape[:2], *_output_size(input, kernel, bias, padding))
    return torch.empty_like(output, memory_format=torch.channels_last) if is_channels_last(input) else output


@depthwise_kernel_gradient.register_fake
def _(input: Tensor, grad: Tensor, padding: Sequence[int]) -> Tensor:
    return input.new_empty(input.shape[1], 1, *_kernel_size(input, grad, padding))


# Both operations are linear in each tensor, and each one's derivatives are made of the two: there are all orders.


def _input_gradient(grad: Tensor, kernel: Tensor, padding: Sequence[int]) -> Tensor:
    """The convolution of the output's gradient with the turned window."""
    around = [size - 1 - pad for size, pad in zip(kernel.shape[2:], padding, strict=True)]
    return cast(Tensor, depthwise(grad, kernel.flip(-2, -1), None, around))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.padding = inputs[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, kernel = ctx.saved_tensors
    needs_input, needs_kernel, needs_bias, _ = ctx.needs_input_grad
    return (
        _input_gradient(grad, kernel, ctx.padding) if needs_input else None,
        depthwise_kernel_gradient(input, grad, ctx.padding) if needs_kernel else None,
        grad.sum((0, 2, 3)) if needs_bias else None,
        None,
    )


def _backward_of_kernel_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, out = ctx.saved_tensors
    needs_input, needs_out, _ = ctx.needs_input_grad
    return (
        _input_gradient(out, grad, ctx.padding) if needs_input else None,
        depthwise(input, grad, None, ctx.padding) if needs_out else None,
        None,
    )


depthwise.register_autograd(_backward, setup_context=_save)
depthwise_kernel_gradient.register_autograd(_backward_of_kernel_gradient, setup_context=_save)
