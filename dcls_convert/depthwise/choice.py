"""Choose the algorithm that computes a depthwise convolution, by a rule on its shapes.

Users can override the rule with an environment variable.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..eager import is_compiled, is_counting_flops, is_eager
from ..errors import DclsConvertError
from ..geometry import Padding, Pair, size_text, static_padding
from ..progress import logger
from ..text import did_you_mean, shortened
from . import matmul, onednn

Algorithm = Literal["torch", "onednn", "matmul"]
Preference = Literal["auto", "torch", "matmul"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
# Device types of GPUs. ROCm reports cuda.
GPUS = frozenset({"cuda", "mps", "xpu"})
# GPUs for which the speed of matrix products has been estimated.
ESTIMATED_DEVICES = frozenset({"cuda"})
MATMUL_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
MAX_WINDOW_SIDE = 51  # cells; matrix products were not tested with larger windows
MAX_CHOICES = 1000  # kept at most; with images of all sizes, the list would grow without end


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """The least work for which matrix products are estimated to be faster than torch's convolution.

    The products need a bank of shifted windows, which costs the same for any number of patches.
    torch's convolution needs no bank, but is slower for each patch. So products pay off if there
    are many patches:

        patches of all images * taps >= min_ratio * inputs of a patch

    A tap is a cell of the window.
    """

    min_taps: int
    min_ratio: int  # of patches x taps to inputs of a patch


# Estimated from counts of operations and bytes, not measured (benchmarks/depthwise_estimates.py).
# In bfloat16, both algorithms are expected to be equally fast at a ratio of
#   4 to 6 on an H100 and 9 to 18 on a 4090 for a training step,
#   9 to 15 on an H100 and 18 to 37 on a 4090 for only a forward pass.
WITH_GRADIENTS = Threshold(min_taps=81, min_ratio=8)
WITHOUT_GRADIENTS = Threshold(min_taps=169, min_ratio=32)


class Choice(NamedTuple):
    """The algorithm that was chosen for convolutions of one kind, and why."""

    device: str
    dtype: torch.dtype
    input_shape: tuple[int, ...]  # (N, C, H, W)
    window: tuple[int, ...]
    gradients: bool  # whether gradients are computed
    algorithm: Algorithm
    why: str

    def __str__(self) -> str:
        images, channels, *map_size = self.input_shape
        purpose = "training" if self.gradients else "forward only"
        return (
            f"{self.device}, {self.dtype}, window {size_text(self.window)} on {images} x "
            f"{channels} maps of {size_text(map_size)}, {purpose}: {self.algorithm} ({self.why})"
        )


# Distinct choices in this process, outside of compiled programs; a dict as an ordered set.
_chosen: dict[Choice, None] = {}


def choices() -> tuple[Choice, ...]:
    """Return the algorithms that computed depthwise convolutions in this process, and why.

    Each distinct case is listed once, up to MAX_CHOICES cases. Those in compiled programs are not
    listed.
    """
    return tuple(_chosen)


def fastest_conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute `torch.nn.functional.conv2d` by the algorithm that `choose_algorithm` returns.

    In exports and under torch.func, the algorithm is torch's own.
    """
    tensors = [input, kernel]
    if bias is not None:
        tensors.append(bias)
    runs_eagerly = is_eager(*tensors) and not is_counting_flops()
    dtype = _computed_dtype(tensors)
    algorithm: Algorithm = "torch"
    can_choose = input.dim() == 4 and dtype is not None
    if can_choose and (runs_eagerly or is_compiled(*tensors)):
        wants_gradients = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors
        )
        algorithm, why = choose_algorithm(
            device=input.device.type,
            dtype=cast(torch.dtype, dtype),
            input_shape=input.shape,
            kernel_shape=kernel.shape,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            gradients=wants_gradients,
        )
        if runs_eagerly and groups == input.shape[1] > 1 and not input.is_meta:
            _remember(input, kernel, cast(torch.dtype, dtype), wants_gradients, algorithm, why)
    if algorithm == "torch":
        return F.conv2d(
            input, kernel, bias, cast(Any, stride), cast(Any, padding), cast(Any, dilation), groups
        )
    kernel = kernel.to(dtype)  # as autocast does; both algorithms cast the input
    if bias is not None:
        bias = bias.to(dtype)
    convolve = matmul.depthwise if algorithm == "matmul" else onednn.depthwise
    pads = cast(Pair, _symmetric_padding(padding, kernel.shape))
    return convolve(input, kernel, bias, cast(Pair, tuple(stride)), pads)


def choose_algorithm(
    *,
    device: str,
    dtype: torch.dtype,
    input_shape: Sequence[int],
    kernel_shape: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
    gradients: bool,
) -> tuple[Algorithm, str]:
    """Return the algorithm for a convolution, and why.

    The choice depends only on the arguments and the environment, so a checkpointed block that is
    recomputed uses the same algorithm. Reentrant checkpoints are an exception: they first run the
    block without gradients.

    Args:
        device: Device type, such as "cpu" or "cuda".
        dtype: The dtype in which the convolution is computed.
        input_shape: (N, C, H, W).
        kernel_shape: (O, C / groups, R, S).
        stride, dilation: (rows, columns).
        padding: As in `torch.nn.functional.conv2d`.
        groups: Number of channel groups.
        gradients: Whether gradients will be computed.

    Raises:
        DclsConvertError: The environment variable has a value that is not allowed.
    """
    preferred = preference()
    pads = _symmetric_padding(padding, kernel_shape)
    is_depthwise = kernel_shape[1] == 1 and groups == input_shape[1] and tuple(dilation) == (1, 1)
    if preferred == "torch":
        return "torch", f"{VARIABLE}=torch"
    if not is_depthwise or pads is None or not all(input_shape):
        return "torch", "only torch supports such convolutions"
    map_size = (input_shape[2], input_shape[3])
    window = (kernel_shape[2], kernel_shape[3])
    can_use_products = (
        kernel_shape[0] == groups  # one kernel for each channel
        and tuple(stride) == (1, 1)
        and dtype in MATMUL_DTYPES
        and (device in GPUS or device == "cpu")
        and _fits_products(map_size, window, pads)
    )
    if can_use_products and preferred == "matmul":
        return "matmul", f"{VARIABLE}=matmul"
    if can_use_products and device in ESTIMATED_DEVICES:
        return _estimated_algorithm(input_shape[0], map_size, window, pads, gradients)
    why_not_products = ""
    if preferred == "matmul":
        why_not_products = f"; {VARIABLE}=matmul, but matrix products cannot compute this"
    if device == "cpu" and dtype in onednn.DTYPES and onednn.max_padding_columns() is not None:
        return "onednn", f"oneDNN's fast kernels on x86{why_not_products}"
    return "torch", f"nothing faster is known{why_not_products}"


def _fits_products(map_size: Pair, window: Pair, pads: Pair) -> bool:
    """True if matrix products support the window, which must not exceed the padded map."""
    if max(window) > MAX_WINDOW_SIDE:
        return False
    for size, taps, pad in zip(map_size, window, pads, strict=True):
        if size + 2 * pad < taps:
            return False
    return True


def _estimated_algorithm(
    images: int, map_size: Pair, window: Pair, pads: Pair, gradients: bool
) -> tuple[Algorithm, str]:
    """Return the algorithm that is estimated to be faster, and why."""
    threshold = WITH_GRADIENTS if gradients else WITHOUT_GRADIENTS
    taps = window[0] * window[1]
    if taps < threshold.min_taps:
        return "torch", f"fewer than {threshold.min_taps} taps"
    vertical, horizontal = matmul.tile_map(map_size, window, pads)
    taps_of_all_patches = images * vertical.patches * horizontal.patches * taps
    inputs_per_patch = vertical.inputs_per_patch * horizontal.inputs_per_patch
    min_taps_of_all_patches = threshold.min_ratio * inputs_per_patch
    # If a program is compiled for any batch size, assume large batches in training, and single
    # images in inference.
    if _is_at_least(taps_of_all_patches, min_taps_of_all_patches, if_unknown=gradients):
        return "matmul", "estimate: enough patches for matrix products"
    return "torch", "estimate: too few patches for matrix products"


def _is_at_least(number: int, bound: int, *, if_unknown: bool) -> bool:
    """Return whether number >= bound; `if_unknown` in a program compiled for any batch size."""
    if not torch.compiler.is_compiling():
        return number >= bound
    # A plain comparison would tie the compiled program to batches on one side of the bound.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(number >= bound):
        return True
    if statically_known_true(number < bound):
        return False
    return if_unknown


def _symmetric_padding(padding: Padding, kernel_shape: Sequence[int]) -> Pair | None:
    """Return the (rows, columns) of padding on either side, for an undilated kernel.

    None if the two sides differ, as for 'same' with an even window.
    """
    rows, columns = static_padding(padding, kernel_shape[2:])
    if rows[0] != rows[1] or columns[0] != columns[1]:
        return None
    return rows[0], columns[0]


def _computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return the dtype in which torch would convolve these tensors; None if their dtypes differ."""
    device = tensors[0].device.type
    dtypes = {tensor.dtype for tensor in tensors}
    has_autocast = device == "cpu" or device in GPUS
    if has_autocast and torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    if len(dtypes) > 1:
        return None
    return tensors[0].dtype


@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """Return the value of the environment variable DCLS_CONVERT_DEPTHWISE.

    Raises:
        DclsConvertError: The value is not one of `Preference`.
    """
    value = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise DclsConvertError(
            f"environment: {VARIABLE}={shortened(value)!r} must be auto, torch or matmul{hint}"
        )
    return cast(Preference, value)


def _remember(
    input: Tensor,
    kernel: Tensor,
    dtype: torch.dtype,
    gradients: bool,
    algorithm: Algorithm,
    why: str,
) -> None:
    """Add a choice to `choices` and to the log, if it was made for the first time."""
    choice = Choice(
        device=str(input.device),
        dtype=dtype,
        input_shape=tuple(input.shape),
        window=tuple(kernel.shape[2:]),
        gradients=gradients,
        algorithm=algorithm,
        why=why,
    )
    if choice not in _chosen and len(_chosen) < MAX_CHOICES:
        _chosen[choice] = None
        logger.debug("%s", choice)
