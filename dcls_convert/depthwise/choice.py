"""Which algorithm computes a depthwise convolution: a rule on its shapes decides.

The user can overrule it by an environment variable.
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
from ..progress import LOG
from ..text import did_you_mean, shown
from . import matmul, onednn

Algorithm = Literal["torch", "onednn", "matmul"]
Preference = Literal["auto", "torch", "matmul"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
# Types of devices on which matrix products are much faster than torch's convolution. ROCm reports
# cuda.
GPUS = frozenset({"cuda", "mps", "xpu"})
# GPUs for which the speed of matrix products has been estimated.
ESTIMATED_DEVICES = frozenset({"cuda"})
MATMUL_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
MAX_WINDOW_SIDE = 51  # cells of a side; matrix products were not tested with larger ones
MAX_CHOICES = 1000  # remembered at most: with images of all sizes, the list would never end


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """The least work for which matrix products are estimated to be faster than torch's convolution.

    The products need a bank of shifted windows, which costs the same for any number of patches.
    Torch's convolution needs none, but is slower for each patch. So products pay if there are many
    patches: if

        patches of all images * taps >= min_ratio * inputs of a patch

    A tap is a cell of the window.
    """

    min_taps: int
    min_ratio: int  # of patches x taps to inputs of a patch


# Estimated from counts of operations and bytes, not measured (benchmarks/depthwise_estimates.py):
# in bfloat16, both are expected to take the same time where the ratio is 4 to 6 on an H100 and 9 to
# 18 on a 4090 for a training step, and 9 to 15 and 18 to 37 for a forward pass alone.
WITH_GRADIENTS = Threshold(min_taps=81, min_ratio=8)
WITHOUT_GRADIENTS = Threshold(min_taps=169, min_ratio=32)


class Choice(NamedTuple):
    """The algorithm of one kind of convolution."""

    device: str
    dtype: torch.dtype
    input_shape: tuple[int, ...]  # (N, C, H, W)
    window: tuple[int, ...]
    gradients: bool  # whether they are wanted
    algorithm: Algorithm
    why: str

    def __str__(self) -> str:
        images, channels, *map_size = self.input_shape
        purpose = "training" if self.gradients else "forward alone"
        return (
            f"{self.device}, {self.dtype}, window {size_text(self.window)} on {images} x "
            f"{channels} maps of {size_text(map_size)}, {purpose}: {self.algorithm} ({self.why})"
        )


# Of depthwise convolutions in this process, outside of compiled programs; without repetitions.
_chosen: dict[Choice, None] = {}


def choices() -> tuple[Choice, ...]:
    """Algorithms that computed depthwise convolutions in this process, and why.

    Each distinct case once, at most MAX_CHOICES, without those in compiled programs.
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
    """`torch.nn.functional.conv2d`, computed by the algorithm that `choose_algorithm` names.

    In exports and under torch.func, it is torch's own.
    """
    tensors = [input, kernel]
    if bias is not None:
        tensors.append(bias)
    runs_eagerly = is_eager(*tensors) and not is_counting_flops()
    dtype = _computed_dtype(tensors)
    algorithm: Algorithm = "torch"
    has_choice = input.dim() == 4 and dtype is not None
    if has_choice and (runs_eagerly or is_compiled(*tensors)):
        wants_gradients = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
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
    """The algorithm of a convolution, and why.

    It depends on the arguments and the environment alone. A checkpointed block that is computed
    again takes the same algorithm, unless the checkpoint is a reentrant one, which runs the block
    without gradients first.

    Args:
        device: Its type: "cpu", "cuda".
        dtype: In which the convolution is computed.
        input_shape: (N, C, H, W).
        kernel_shape: (O, C / groups, R, S).
        stride, dilation: Of rows and columns.
        padding: As `torch.nn.functional.conv2d` takes it.
        groups: Number of groups of channels.
        gradients: Whether any will be asked for.

    Raises:
        DclsConvertError: The environment variable has a value that is not allowed.
    """
    preferred = preference()
    pads = _symmetric_padding(padding, kernel_shape)
    is_depthwise = kernel_shape[1] == 1 and groups == input_shape[1] and tuple(dilation) == (1, 1)
    if preferred == "torch":
        return "torch", f"{VARIABLE}=torch"
    if not is_depthwise or pads is None or not all(input_shape):
        return "torch", "only torch computes such convolutions"
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
    """Whether matrix products take the window, which must not be larger than the padded map."""
    if max(window) > MAX_WINDOW_SIDE:
        return False
    for size, taps, pad in zip(map_size, window, pads, strict=True):
        if size + 2 * pad < taps:
            return False
    return True


def _estimated_algorithm(
    images: int, map_size: Pair, window: Pair, pads: Pair, gradients: bool
) -> tuple[Algorithm, str]:
    threshold = WITH_GRADIENTS if gradients else WITHOUT_GRADIENTS
    taps = window[0] * window[1]
    if taps < threshold.min_taps:
        return "torch", f"fewer than {threshold.min_taps} taps"
    vertical, horizontal = matmul.tile_map(map_size, window, pads)
    taps_of_patches = images * vertical.patches * horizontal.patches * taps
    inputs_per_patch = vertical.inputs_per_patch * horizontal.inputs_per_patch
    least = threshold.min_ratio * inputs_per_patch
    # A program compiled for any batch: training comes in batches, inference often in single images.
    if _is_at_least(taps_of_patches, least, unknown=gradients):
        return "matmul", "estimate: enough patches for matrix products"
    return "torch", "estimate: too few patches for matrix products"


def _is_at_least(number: int, least: int, *, unknown: bool) -> bool:
    """Whether number >= least; `unknown` if a program is compiled for batches of any size."""
    if not torch.compiler.is_compiling():
        return number >= least
    # A plain comparison would tie the compiled program to batches on one side of the bound.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(number >= least):
        return True
    if statically_known_true(number < least):
        return False
    return unknown


def _symmetric_padding(padding: Padding, kernel_shape: Sequence[int]) -> Pair | None:
    """Padding as cells on either side of rows and columns, of an undilated kernel.

    None if the sides differ, as for 'same' with an even window.
    """
    rows, columns = static_padding(padding, kernel_shape[2:])
    if rows[0] != rows[1] or columns[0] != columns[1]:
        return None
    return rows[0], columns[0]


def _computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which torch would convolve these; None if they differ."""
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
    """What the environment variable DCLS_CONVERT_DEPTHWISE asks for.

    Raises:
        DclsConvertError: It has another value than those of `Preference`.
    """
    asked = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if asked not in allowed:
        hint = did_you_mean(asked, allowed)
        raise DclsConvertError(
            f"environment: {VARIABLE}={shown(asked)!r} must be auto, torch or matmul{hint}"
        )
    return cast(Preference, asked)


def _remember(
    input: Tensor,
    kernel: Tensor,
    dtype: torch.dtype,
    gradients: bool,
    algorithm: Algorithm,
    why: str,
) -> None:
    """Add to `choices`, and to the log, what was chosen for the first time."""
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
        LOG.debug("%s", choice)
