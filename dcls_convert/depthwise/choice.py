"""Choose the algorithm that computes a depthwise convolution: one table, a row for each.

The choice is a function of device, dtype and shapes; nothing is timed while a network runs. Users
can override it with an environment variable, which is read once.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..errors import DclsConvertError
from ..geometry import Padding, Pair, size_text, static_padding
from ..progress import logger
from ..text import did_you_mean, shortened
from . import onednn, products
from .eager import is_compiled, is_counting_flops, is_eager

Name = Literal["torch", "onednn", "blocks", "products"]
Preference = Literal["auto", "torch", "blocks", "products"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
# Device types of GPUs. ROCm reports cuda.
GPUS = frozenset({"cuda", "mps", "xpu"})
# AMD's GPUs whose registers and shared memory suffice for blocks; NVIDIA's have them from 8.0 on.
BLOCKS_ON_AMD = frozenset({"gfx90a", "gfx942", "gfx950"})
BLOCKS_ON_NVIDIA = (8, 0)
BLOCKS_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Measured on an H200: with at most this many taps (cells of the window), torch is faster.
MAX_TAPS_FOR_TORCH = 49
PRODUCTS_DTYPES = BLOCKS_DTYPES | {torch.float64}
MIN_IMAGES_FOR_PRODUCTS = 8
MIN_TAPS_FOR_PRODUCTS = 81
MAX_WINDOW_SIDE = 51  # cells; nothing here was tested with larger windows
MAX_CHANNELS = 65_535  # of a grid's second axis
MAX_OFFSET = 2**31  # blocks compute with 32 bits inside an image, and inside a channel
MAX_CHOICES = 1000  # kept at most; with images of all sizes, the list would grow without end


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
    has_blocks: bool  # whether blocks can be computed on the device
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
    def taps(self) -> int:
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
    return onednn.depthwise(input, kernel, bias, cast(Pair, case.stride), cast(Pair, case.padding))


def _can_blocks(case: Case) -> bool:
    rows, columns = case.window
    images, channels, height, width = case.input_shape
    return (
        case.is_depthwise
        and case.has_blocks
        and case.kernel_shape[0] == case.groups <= MAX_CHANNELS
        and case.dtype in BLOCKS_DTYPES
        and rows % 2 == columns % 2 == 1
        and max(case.window) <= MAX_WINDOW_SIDE
        and case.padding == (rows // 2, columns // 2)
        and set(case.stride) <= {1, 2}
        and channels * height * width < MAX_OFFSET
        and images * (height + 7) * (width + 7) < MAX_OFFSET
    )


def _why_blocks(case: Case) -> str | None:
    if case.device == "cpu" or case.taps <= MAX_TAPS_FOR_TORCH:
        return None
    return f"more than {MAX_TAPS_FOR_TORCH} taps, on tensor cores"


def _by_blocks(input: Tensor, kernel: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    from . import blocks  # needs Triton

    return blocks.depthwise(input, kernel, bias, cast(Pair, case.stride), case.dtype)


def _can_products(case: Case) -> bool:
    if not case.is_depthwise or case.kernel_shape[0] != case.groups or case.stride != (1, 1):
        return False
    sides = zip(case.input_shape[2:], case.window, cast(Pair, case.padding), strict=True)
    fits = all(size + 2 * padding >= taps for size, taps, padding in sides)
    return (
        fits
        and max(case.window) <= MAX_WINDOW_SIDE
        and case.dtype in PRODUCTS_DTYPES
        and (case.device in GPUS or case.device == "cpu")
    )


def _why_products(case: Case) -> str | None:
    if (
        case.device != "cuda"
        or case.has_blocks
        or case.taps < MIN_TAPS_FOR_PRODUCTS
        or case.input_shape[0] < MIN_IMAGES_FOR_PRODUCTS
    ):
        return None
    return (
        f"at least {MIN_TAPS_FOR_PRODUCTS} taps and {MIN_IMAGES_FOR_PRODUCTS} images, "
        "on a GPU without blocks"
    )


def _by_products(input: Tensor, kernel: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    kernel = kernel.to(case.dtype)
    if bias is not None:
        bias = bias.to(case.dtype)
    return products.depthwise(input, kernel, bias, cast(Pair, case.padding))


def _why_torch(case: Case) -> str | None:
    return "nothing faster is known" if case.is_depthwise else "not such a depthwise convolution"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The algorithm that was chosen for convolutions of one kind, and why."""

    device: str
    dtype: torch.dtype
    input_shape: tuple[int, ...]  # (N, C, H, W)
    window: tuple[int, ...]
    algorithm: Name
    why: str

    def __str__(self) -> str:
        images, channels, *map_size = self.input_shape
        return (
            f"{self.device}, {self.dtype}, window {size_text(self.window)} on {images} x "
            f"{channels} maps of {size_text(map_size)}: {self.algorithm} ({self.why})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    case: Case
    algorithm: Algorithm
    why: str


# Decisions of this process, outside of compiled programs, by all that they depend on.
_decisions: dict[tuple[object, ...], _Decision] = {}
# Those of depthwise convolutions that are to be reported; a dict as an ordered set.
_chosen: dict[Choice, None] = {}


def choices() -> tuple[Choice, ...]:
    """Return the algorithms that computed depthwise convolutions in this process, and why.

    Each distinct case is listed once, up to MAX_CHOICES cases. Those in compiled programs are not
    listed.
    """
    return tuple(_chosen)


def find_algorithm(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    *others: Tensor,
) -> tuple[Algorithm, Case | None]:
    """Return the algorithm for these tensors, and the case for its `convolve`.

    In exports and under torch.func, the algorithm is torch's own, and there is no case.

    Args:
        kernel: Any tensor with the kernel's dtype, and the one that needs gradients.
        bias: As in `F.conv2d`.
        others: More tensors that the algorithm's own functions may take.
    """
    tensors = [input, kernel, *others]
    if bias is not None:
        tensors.append(bias)
    runs_eagerly = is_eager(*tensors)
    dtype = None
    if input.dim() == 4 and (runs_eagerly or is_compiled(*tensors)):
        dtype = _computed_dtype(input, kernel, bias)
    if dtype is None:
        return TORCH, None
    if not runs_eagerly:
        decision = _decide(input, dtype, convolution)
        return decision.algorithm, decision.case
    if is_counting_flops():
        return TORCH, None
    key = (input.device, dtype, input.shape, convolution)
    found = _decisions.get(key)
    if found is None:
        found = _decide(input, dtype, convolution)
        _remember(input, found)
        if len(_decisions) >= MAX_CHOICES:
            _decisions.clear()
        _decisions[key] = found
    return found.algorithm, found.case


def _decide(input: Tensor, dtype: torch.dtype, convolution: Convolution) -> _Decision:
    case = Case(
        device=input.device.type,
        has_blocks=has_blocks(input.device),
        dtype=dtype,
        input_shape=tuple(input.shape),
        kernel_shape=convolution.kernel_shape,
        stride=convolution.stride,
        padding=convolution.symmetric_padding(),
        dilation=convolution.dilation,
        groups=convolution.groups,
    )
    algorithm, why = choose_algorithm(case, preference())
    return _Decision(case=case, algorithm=algorithm, why=why)


def _remember(input: Tensor, decision: _Decision) -> None:
    """Add a decision to `choices` and to the log, if it is about a depthwise convolution."""
    case = decision.case
    if case.groups != case.input_shape[1] or case.groups == 1 or input.is_meta:
        return
    choice = Choice(
        device=str(input.device),
        dtype=case.dtype,
        input_shape=case.input_shape,
        window=case.window,
        algorithm=decision.algorithm.name,
        why=decision.why,
    )
    if choice not in _chosen and len(_chosen) < MAX_CHOICES:
        _chosen[choice] = None
        logger.debug("%s", choice)


def fastest_conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute `torch.nn.functional.conv2d` by the algorithm that the table gives.

    Raises:
        DclsConvertError: The environment variable has a value that is not allowed.
    """
    convolution = Convolution(
        kernel_shape=tuple(kernel.shape),
        stride=tuple(stride),
        padding=padding,
        dilation=tuple(dilation),
        groups=groups,
    )
    algorithm, case = find_algorithm(input, kernel, bias, convolution)
    return convolve(algorithm, case, input, kernel, bias, convolution)


def convolve(
    algorithm: Algorithm,
    case: Case | None,
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
) -> Tensor:
    """Convolve by the algorithm that `find_algorithm` has returned."""
    if algorithm.convolve is not None and case is not None:
        return algorithm.convolve(input, kernel, bias, case)
    return F.conv2d(
        input,
        kernel,
        bias,
        cast(Any, convolution.stride),
        cast(Any, convolution.padding),
        cast(Any, convolution.dilation),
        convolution.groups,
    )


def _computed_dtype(input: Tensor, kernel: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Return the dtype in which torch would convolve these tensors.

    None if their dtypes or devices differ.
    """
    if kernel.device != input.device:
        return None  # torch's convolution refuses this; kernels would read the wrong memory
    device = input.device.type
    dtype = input.dtype
    are_equal = kernel.dtype == dtype and (bias is None or bias.dtype == dtype)
    if (device == "cpu" or device in GPUS) and torch.is_autocast_enabled(device):
        has_double = torch.float64 in (dtype, kernel.dtype) or (
            bias is not None and bias.dtype == torch.float64
        )
        if not has_double:
            return torch.get_autocast_dtype(device)
    return dtype if are_equal else None


# Looked up once. torch.compile can neither trace these functions nor use a cache.


@assume_constant_result  # type: ignore[untyped-decorator]
def has_blocks(device: torch.device) -> bool:
    """True if `blocks` can be computed on this device, which needs Triton; on CPUs, interpreted."""
    return _has_blocks(device)


@functools.cache
def _has_blocks(device: torch.device) -> bool:
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0] in BLOCKS_ON_AMD
    return torch.cuda.get_device_capability(device) >= BLOCKS_ON_NVIDIA


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
            f"auto, torch, blocks or products{hint}"
        )
    return cast(Preference, value)
