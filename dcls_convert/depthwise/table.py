"""The table of algorithms for depthwise convolutions, and the choice of an algorithm.

The choice is a function of device, dtype and shapes; nothing is timed while a network runs. Users
can override it with an environment variable, which is read once.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..depthwise import onednn
from ..errors import DclsConvertError
from ..geometry import Pair, size_text
from ..progress import logger
from ..text import did_you_mean, shortened
from .devices import AUTOCAST_DEVICES, GPUS, why_no_blocks
from .eager import is_being_compiled
from .layouts import BLOCK_SIDE, MAX_OFFSET

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
MAX_MAP_SIDE = 2**20 * BLOCK_SIDE // 2  # cells along an axis; see `block_kernels.quotient`


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSpec:
    """A convolution in plain values; arguments are as in `F.conv2d`."""

    device: torch.device
    dtype: torch.dtype  # in which it is computed
    input_shape: tuple[int, ...]  # (N, C, H, W)
    kernel_shape: tuple[int, ...]  # (O, C / groups, R, S)
    stride: Pair
    padding: str | Pair  # "same" only if the two sides of an axis differ
    dilation: Pair
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
            and not isinstance(self.padding, str)
            and all(self.input_shape)
        )

    @property
    def has_one_kernel_per_channel(self) -> bool:
        """True if it is depthwise and has as many outputs as inputs."""
        return self.is_depthwise and self.kernel_shape[0] == self.groups

    def __str__(self) -> str:
        images, channels, *map_size = self.input_shape
        return (
            f"{self.device}, {self.dtype}, window {size_text(self.window)} on {images} x "
            f"{channels} maps of {size_text(map_size)}"
        )


# Input (N, C, H, W), bias and kernel -> output.
Convolve = Callable[..., Tensor]


class Algorithm(NamedTuple):
    """A row of the table."""

    name: str
    supports: Callable[[ConvSpec], bool]  # True if it can compute the convolution
    is_best: Callable[[ConvSpec], bool]  # True if no later row is faster
    # Returns the function that convolves. The given input and bias are examples: in later calls,
    # they have the same shape, strides and dtype.
    prepare: Callable[[ConvSpec, Tensor, Tensor | None], Convolve]


def _can_run_onednn(spec: ConvSpec) -> bool:
    return (
        spec.is_depthwise
        and spec.device.type == "cpu"
        and spec.dtype in onednn.DTYPES
        and onednn.max_padding_columns() is not None
    )


def _prepare_onednn(spec: ConvSpec, input: Tensor, bias: Tensor | None) -> Convolve:
    padding = cast(Pair, spec.padding)
    return functools.partial(
        onednn.depthwise_by_onednn, dtype=spec.dtype, stride=spec.stride, padding=padding
    )


def _can_run_blocks(spec: ConvSpec) -> bool:
    rows, columns = spec.window
    images, channels, height, width = spec.input_shape
    return (
        spec.has_one_kernel_per_channel
        and spec.groups <= MAX_CHANNELS
        and spec.dtype in BLOCKS_DTYPES
        and rows % 2 == columns % 2 == 1
        and max(spec.window) <= MAX_WINDOW_SIDE
        and spec.padding == (rows // 2, columns // 2)
        and set(spec.stride) <= {1, 2}
        and channels * height * width < MAX_OFFSET
        and images * (height + BLOCK_SIDE - 1) * (width + BLOCK_SIDE - 1) < MAX_OFFSET
        and max(height, width) < MAX_MAP_SIDE
        and why_no_blocks(spec.device) is None
    )


def _are_blocks_best(spec: ConvSpec) -> bool:
    return spec.device.type != "cpu" and spec.cells > MAX_CELLS_FOR_TORCH


def _prepare_blocks(spec: ConvSpec, input: Tensor, bias: Tensor | None) -> Convolve:
    from .blocks import convolver_of_windows  # needs Triton

    return convolver_of_windows(
        input, spec.window, spec.stride, spec.dtype, has_bias=bias is not None
    )


def _can_run_products(spec: ConvSpec) -> bool:
    if not spec.has_one_kernel_per_channel or spec.stride != (1, 1):
        return False
    padding = cast(Pair, spec.padding)
    sides = zip(spec.input_shape[2:], spec.window, padding, strict=True)
    fits = all(size + 2 * cells >= side for size, side, cells in sides)
    return (
        fits
        and max(spec.window) <= MAX_WINDOW_SIDE
        and spec.dtype in PRODUCTS_DTYPES
        and (spec.device.type in GPUS or spec.device.type == "cpu")
    )


def _are_products_best(spec: ConvSpec) -> bool:
    return (
        spec.device.type == "cuda"
        and spec.cells >= MIN_CELLS_FOR_PRODUCTS
        and spec.input_shape[0] >= MIN_IMAGES_FOR_PRODUCTS
        and why_no_blocks(spec.device) is not None
    )


def _prepare_products(spec: ConvSpec, input: Tensor, bias: Tensor | None) -> Convolve:
    from .products import depthwise_by_products  # for GPUs alone

    padding = cast(Pair, spec.padding)
    return functools.partial(depthwise_by_products, dtype=spec.dtype, padding=padding)


def _prepare_torch(spec: ConvSpec, input: Tensor, bias: Tensor | None) -> Convolve:
    padding: Any = spec.padding

    def convolve(input: Tensor, bias: Tensor | None, kernel: Tensor) -> Tensor:
        return F.conv2d(input, kernel, bias, spec.stride, padding, spec.dilation, spec.groups)

    return convolve


def _always(spec: ConvSpec) -> bool:
    return True


TORCH = Algorithm("torch", _always, _always, _prepare_torch)
ALGORITHMS = (
    Algorithm("onednn", _can_run_onednn, _always, _prepare_onednn),
    Algorithm("blocks", _can_run_blocks, _are_blocks_best, _prepare_blocks),
    Algorithm("products", _can_run_products, _are_products_best, _prepare_products),
    TORCH,
)


# torch.compile can neither trace this function nor use a cache.
@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """Return the value of the environment variable DCLS_CONVERT_DEPTHWISE.

    Raises:
        DclsConvertError: The value is not one of `Preference`.
    """
    return _preference()


@functools.cache
def _preference() -> Preference:
    value = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise DclsConvertError(
            f"environment: {VARIABLE}={shortened(value)!r} must be "
            f"{', '.join(allowed[:-1])} or {allowed[-1]}{hint}"
        )
    return cast(Preference, value)


def choose_algorithm(spec: ConvSpec, preferred: Preference = "auto") -> Algorithm:
    """Return the first algorithm that can compute a convolution, and is best.

    If the preferred algorithm can compute the convolution, it is returned instead.
    """
    for algorithm in ALGORITHMS:
        if algorithm.name == preferred and algorithm.supports(spec):
            return algorithm
    for algorithm in ALGORITHMS:
        if algorithm.supports(spec) and algorithm.is_best(spec):
            return algorithm
    return TORCH


def computed_dtype(input: Tensor, kernel: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Return the dtype in which torch would convolve an input with a kernel.

    None if their dtypes or devices differ.
    """
    dtypes = {input.dtype, kernel.dtype}
    devices = {input.device, kernel.device}
    if bias is not None:
        dtypes.add(bias.dtype)
        devices.add(bias.device)
    if len(devices) > 1:
        return None  # torch's convolution refuses this; kernels would read the wrong memory
    device = input.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        if torch.float64 not in dtypes:
            return torch.get_autocast_dtype(device)
    if len(dtypes) > 1:
        return None
    return input.dtype


def find_algorithm(spec: ConvSpec, *tensors: Tensor, eager: bool) -> Algorithm:
    """Return the algorithm for a convolution and its tensors.

    If tensors are neither eager nor compiled, torch's algorithm is returned: in exports, under
    torch.func, and while FLOPs are counted.

    Raises:
        DclsConvertError: The environment variable has a value that is not allowed.
    """
    if len(spec.input_shape) != 4:
        return TORCH
    if not eager and not is_being_compiled(*tensors):
        return TORCH
    algorithm = choose_algorithm(spec, preference())
    if eager and spec.is_depthwise:
        logger.debug("%s: by %s", spec, algorithm.name)
        is_slow = algorithm is TORCH and spec.cells > MAX_CELLS_FOR_TORCH
        if is_slow and preference() == "auto" and takes_kernels(spec.device):
            warn_of_slow_window(spec.window)
    return algorithm


@functools.cache
def warn_of_slow_window(window: Pair) -> None:
    """Say, once for each window, that torch convolves it."""
    logger.warning(
        "a depthwise window of %s is convolved by torch, which is slow on GPUs; this package's "
        "kernels need odd windows of up to %s, a padding that keeps the size, stride 1 or 2, and "
        "bfloat16, float16 or float32",
        size_text(window),
        size_text((MAX_WINDOW_SIDE, MAX_WINDOW_SIDE)),
    )


def takes_kernels(device: torch.device) -> bool:
    """True if this package's kernels for GPUs may be launched."""
    is_gpu = device.type != "cpu" or preference() == "blocks"
    return is_gpu and why_no_blocks(device) is None
