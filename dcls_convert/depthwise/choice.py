"""Choose the algorithm that computes a depthwise convolution, and remember what was chosen.

The `table` decides. Users can override it with an environment variable, which is read once.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..errors import DclsConvertError
from ..geometry import Padding, size_text
from ..progress import logger
from ..text import did_you_mean, shortened
from .devices import GPUS, why_no_blocks
from .eager import is_compiled, is_counting_flops, is_eager
from .table import (
    TORCH,
    VARIABLE,
    Algorithm,
    Case,
    Convolution,
    Name,
    Preference,
    choose_algorithm,
)

MAX_CHOICES = 1000  # kept at most; with images of all sizes, the list would grow without end


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
        no_blocks=why_no_blocks(input.device),
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
    return convolve_by(algorithm, case, input, kernel, bias, convolution)


def convolve_by(
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
            f"auto, torch, blocks or products{hint}"
        )
    return cast(Preference, value)
