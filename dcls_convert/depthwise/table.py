"""The table of algorithms for depthwise convolutions: when each can be used, and when it should be.

The choice is a function of device, dtype and shapes; nothing is timed while a network runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from ..geometry import Padding, Pair, static_padding
from . import onednn, products
from .devices import GPUS
from .layouts import BLOCK_SIDE, MAX_OFFSET

Name = Literal["torch", "onednn", "blocks", "products"]
Preference = Literal["auto", "torch", "blocks", "products"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
BLOCKS_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Measured on an H200: in a window of at most this many cells, torch is faster.
MAX_CELLS_FOR_TORCH = 49
PRODUCTS_DTYPES = BLOCKS_DTYPES | {torch.float64}
MIN_IMAGES_FOR_PRODUCTS = 8
MIN_CELLS_FOR_PRODUCTS = 81
MAX_WINDOW_SIDE = 51  # cells; nothing here was tested with larger windows
MAX_CHANNELS = 65_535  # of a grid's second axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """The arguments of a convolution that do not depend on its input; as in `F.conv2d`."""

    kernel_shape: tuple[int, ...]  # (O, C / groups, R, S)
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int

    def symmetric_padding(self) -> Pair | None:
        """Return the (rows, columns) of padding on either side, for an undilated kernel.

        None if the two sides differ, as for 'same' with an even window.
        """
        rows, columns = static_padding(self.padding, self.kernel_shape[2:])
        if rows[0] != rows[1] or columns[0] != columns[1]:
            return None
        return rows[0], columns[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A convolution whose algorithm is to be chosen, in plain values."""

    device: str  # type, such as "cpu" or "cuda"
    no_blocks: str | None  # why the device cannot compute blocks; None if it can
    dtype: torch.dtype  # in which the convolution is computed
    input_shape: tuple[int, ...]  # (N, C, H, W)
    kernel_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pair | None  # None if it is not symmetric
    dilation: tuple[int, ...]
    groups: int

    @property
    def window(self) -> Pair:
        return (self.kernel_shape[2], self.kernel_shape[3])

    @property
    def cells(self) -> int:
        """Cells of the window."""
        return self.kernel_shape[2] * self.kernel_shape[3]

    @property
    def is_depthwise(self) -> bool:
        """True if the maps are not empty, and each kernel is of one channel, undilated."""
        return (
            self.groups == self.input_shape[1]
            and self.kernel_shape[1] == 1
            and self.dilation == (1, 1)
            and self.padding is not None
            and all(self.input_shape)
        )


# The rows: whether an algorithm can compute a case, and why it should; None if it should not.


def _can_onednn(case: Case) -> bool:
    return (
        case.is_depthwise
        and case.device == "cpu"
        and case.dtype in onednn.DTYPES
        and onednn.max_padding_columns() is not None
    )


def _why_onednn(case: Case) -> str | None:
    return "oneDNN's fast kernels on x86"


def _by_onednn(input: Tensor, kernel: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    kernel = kernel.to(case.dtype)  # as autocast does; `onednn` casts the input
    if bias is not None:
        bias = bias.to(case.dtype)
    return onednn.depthwise_by_onednn(
        input, kernel, bias, cast(Pair, case.stride), cast(Pair, case.padding)
    )


def _can_blocks(case: Case) -> bool:
    rows, columns = case.window
    images, channels, height, width = case.input_shape
    return (
        case.is_depthwise
        and case.no_blocks is None
        and case.kernel_shape[0] == case.groups <= MAX_CHANNELS
        and case.dtype in BLOCKS_DTYPES
        and rows % 2 == columns % 2 == 1
        and max(case.window) <= MAX_WINDOW_SIDE
        and case.padding == (rows // 2, columns // 2)
        and set(case.stride) <= {1, 2}
        and channels * height * width < MAX_OFFSET
        and images * (height + BLOCK_SIDE - 1) * (width + BLOCK_SIDE - 1) < MAX_OFFSET
    )


def _why_blocks(case: Case) -> str | None:
    if case.device == "cpu" or case.cells <= MAX_CELLS_FOR_TORCH:
        return None
    return f"more than {MAX_CELLS_FOR_TORCH} cells, on tensor cores"


def _by_blocks(input: Tensor, kernel: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    from . import blocks  # needs Triton

    return blocks.depthwise_by_blocks(input, kernel, bias, cast(Pair, case.stride), case.dtype)


def _can_products(case: Case) -> bool:
    if not case.is_depthwise or case.kernel_shape[0] != case.groups or case.stride != (1, 1):
        return False
    sides = zip(case.input_shape[2:], case.window, cast(Pair, case.padding), strict=True)
    fits = all(size + 2 * padding >= side for size, side, padding in sides)
    return (
        fits
        and max(case.window) <= MAX_WINDOW_SIDE
        and case.dtype in PRODUCTS_DTYPES
        and (case.device in GPUS or case.device == "cpu")
    )


def _why_products(case: Case) -> str | None:
    if (
        case.device != "cuda"
        or case.no_blocks is None
        or case.cells < MIN_CELLS_FOR_PRODUCTS
        or case.input_shape[0] < MIN_IMAGES_FOR_PRODUCTS
    ):
        return None
    return (
        f"at least {MIN_CELLS_FOR_PRODUCTS} cells and {MIN_IMAGES_FOR_PRODUCTS} images; "
        f"no blocks: {case.no_blocks}"
    )


def _by_products(input: Tensor, kernel: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    kernel = kernel.to(case.dtype)
    if bias is not None:
        bias = bias.to(case.dtype)
    return products.depthwise_by_products(input, kernel, bias, cast(Pair, case.padding))


def _why_torch(case: Case) -> str | None:
    if not case.is_depthwise:
        return "not such a depthwise convolution"
    why = "nothing faster is known"
    if case.device == "cuda" and case.no_blocks is not None and case.cells > MAX_CELLS_FOR_TORCH:
        why += f"; no blocks: {case.no_blocks}"
    return why


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """A row of the table."""

    name: Name
    can: Callable[[Case], bool]
    why: Callable[[Case], str | None]
    convolve: Callable[[Tensor, Tensor, Tensor | None, Case], Tensor] | None  # None: F.conv2d


TORCH = Algorithm(name="torch", can=lambda case: True, why=_why_torch, convolve=None)
# The first one that can compute a case, and should, is taken.
ALGORITHMS = (
    Algorithm(name="onednn", can=_can_onednn, why=_why_onednn, convolve=_by_onednn),
    Algorithm(name="blocks", can=_can_blocks, why=_why_blocks, convolve=_by_blocks),
    Algorithm(name="products", can=_can_products, why=_why_products, convolve=_by_products),
    TORCH,
)


def choose_algorithm(case: Case, preferred: Preference = "auto") -> tuple[Algorithm, str]:
    """Return the algorithm for a case, and why.

    A preferred algorithm is taken wherever it can compute the case; elsewhere, the table decides.
    """
    refused = ""
    for algorithm in ALGORITHMS:
        if algorithm.name == preferred:
            if algorithm.can(case):
                return algorithm, f"{VARIABLE}={preferred}"
            refused = f"; {VARIABLE}={preferred}, but {preferred} cannot compute this"
    for algorithm in ALGORITHMS:
        if algorithm.can(case):
            why = algorithm.why(case)
            if why is not None:
                return algorithm, why + refused
    raise AssertionError("torch can compute every case, and says why")
