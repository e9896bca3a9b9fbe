"""Depthwise convolution in the fastest way known; on GPUs by an estimate, or timed where cudnn.benchmark asks so."""

import math
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..errors import DclsConvertError, did_you_mean, shown
from . import matmul, onednn
from .eager import is_channels_last, is_compiled, is_counted, is_eager, is_watched
from .geometry import Padding, Pair, padded_cells, size_text

Way = Literal["torch", "onednn", "matmul"]
Preference = Literal["auto", "torch", "matmul"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
GPUS = frozenset({"cuda", "mps", "xpu"})  # ROCm's are called cuda, too
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
FEWEST_CELLS = (
    81  # in windows that go as matrix products on GPUs: an estimate, like all that is known of GPUs
)
LARGEST_WINDOW = 51  # cells of a side; matrix products were not tested with larger ones
MARGIN = 1.15  # by which matrix products must win where they are timed
ROUNDS = 3  # of timing, after one for warmth


class Case(NamedTuple):
    """A convolution that matrix products can compute, by what their time depends on."""

    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    channels: int
    map_size: Pair
    window: Pair
    padding: Pair  # cells on either side


class Choice(NamedTuple):
    """The way that a case goes on a GPU, for the rest of the process."""

    case: Case
    batch: int  # the largest power of two that is not larger
    way: Way
    milliseconds: dict[
        Way, float
    ]  # of a forward pass and both gradients; empty where nothing was timed

    def __str__(self) -> str:
        case, times = (
            self.case,
            ", ".join(f"{way} {ms:.3g} ms" for way, ms in self.milliseconds.items()),
        )
        sizes = f"window {size_text(case.window)} on {case.channels} channels of {size_text(case.map_size)}"
        kind = f"{case.dtype}{', channels_last' * case.channels_last}, batch from {self.batch}"
        return f"{case.device}, {sizes}, {kind}: {self.way} ({times or 'not timed'})"


chosen: dict[tuple[Case, int], Choice] = {}


def conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d`, the way that `depthwise_way` says; torch's own in exports and under torch.func."""
    tensors = [input, kernel] if bias is None else [input, kernel, bias]
    eager = is_eager(*tensors) and not is_counted()
    if input.dim() == 4 and (eager or is_compiled(*tensors)):
        dtype, last = _computed_dtype(tensors), is_channels_last(input)
        geometry = (input.shape, kernel.shape, stride, padding, dilation, groups)
        way = depthwise_way(
            input.device, dtype, last, *geometry, tensors=(input, kernel) if eager else None
        )
        if way != "torch":
            input, kernel, *rest = (tensor.to(dtype) for tensor in tensors)  # what autocast does
            options = cast(Pair, tuple(stride)), cast(Pair, _cells(padding, kernel.shape))
            convolve = matmul.depthwise if way == "matmul" else onednn.depthwise
            return convolve(input, kernel, rest[0] if rest else None, *options)
    return F.conv2d(
        input, kernel, bias, cast(Any, stride), cast(Any, padding), cast(Any, dilation), groups
    )


def depthwise_way(
    device: torch.device,
    dtype: torch.dtype | None,
    channels_last: bool,
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
    *,
    tensors: tuple[Tensor, Tensor] | None = None,
) -> Way:
    """The way of `conv2d` for input_size (N, C, H, W) and kernel_size (O, C / groups, R, S).

    `dtype` is of the computation; None where tensors differ. Without `tensors`, input and kernel, nothing is timed.
    """
    preferred, cells, kind = preference(), _cells(padding, kernel_size), device.type
    is_depthwise = kernel_size[1] == 1 and groups == input_size[1] and tuple(dilation) == (1, 1)
    if (
        preferred == "torch"
        or not is_depthwise
        or not all(input_size)
        or dtype is None
        or cells is None
    ):
        return "torch"
    map_size, window = (input_size[2], input_size[3]), (kernel_size[2], kernel_size[3])
    on_gpu = kind in GPUS
    multiplies = (
        (
            (on_gpu and math.prod(window) >= FEWEST_CELLS)
            or (preferred == "matmul" and (on_gpu or kind == "cpu"))
        )
        and dtype in FLOATS
        and kernel_size[0] == groups
        and tuple(stride) == (1, 1)
        and max(window) <= LARGEST_WINDOW
        and all(
            size + 2 * pad >= taps for size, pad, taps in zip(map_size, cells, window, strict=True)
        )
    )
    if not multiplies:
        known = kind == "cpu" and dtype in onednn.DTYPES and onednn.most_columns() is not None
        return "onednn" if known else "torch"
    if preferred == "matmul" or torch.compiler.is_compiling():
        return "matmul"
    return _choose(
        Case(device, dtype, channels_last, groups, map_size, window, cells), input_size[0], tensors
    )


def _cells(padding: Padding, kernel_size: Sequence[int]) -> Pair | None:
    """Padding as cells on either side of rows and columns; None where the sides differ: 'same' with an even window."""
    (above, below), (left, right) = padded_cells(padding, (), kernel_size[2:], ())
    return (above, left) if (above, left) == (below, right) else None


def _computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which torch would convolve these; None where they differ."""
    device, dtypes = tensors[0].device.type, {tensor.dtype for tensor in tensors}
    known = device == "cpu" or device in GPUS
    if known and torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    return tensors[0].dtype if len(dtypes) == 1 else None


@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """What the environment variable DCLS_CONVERT_DEPTHWISE asks for; DclsConvertError where it is another value."""
    asked = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if asked not in allowed:
        hint = did_you_mean(asked, allowed)
        raise DclsConvertError(
            f"environment: {VARIABLE}={shown(asked)!r} must be auto, torch or matmul{hint}"
        )
    return cast(Preference, asked)


def _choose(case: Case, batch: int, tensors: tuple[Tensor, Tensor] | None) -> Way:
    """What was chosen for the case, or is at first sight: by time where the user asks for it and nothing forbids it."""
    # It holds for the process: a block of layers computed again, from a checkpoint, must be computed in the same way.
    key = case, batch.bit_length()
    choice = chosen.get(key)
    if choice is None and tensors is not None:
        asked = torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
        capturing = case.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        times = _time(case, *tensors) if asked and not capturing and not is_watched() else {}
        way: Way = "torch" if times and times["torch"] < MARGIN * times["matmul"] else "matmul"
        # Another thread may have been faster.
        choice = chosen.setdefault(key, Choice(case, 1 << batch.bit_length() - 1, way, times))
    return "matmul" if choice is None else choice.way


@torch.no_grad()
def _time(case: Case, input: Tensor, kernel: Tensor) -> dict[Way, float]:
    """Milliseconds of a forward pass and both gradients; without autograd, so that no hook of the user's is called."""
    input, kernel, cells = input.to(case.dtype), kernel.to(case.dtype), case.padding

    def by_torch() -> None:
        output = F.conv2d(input, kernel, padding=cells, groups=case.channels)
        torch.ops.aten.convolution_backward(
            *(output, input, kernel, None, [1, 1], cells, [1, 1], False, [0, 0], case.channels),
            [True, True, False],
        )

    def by_matmul() -> None:
        output = matmul.convolve(input, kernel, cells)
        matmul.input_gradient(output, kernel, cells)
        matmul.kernel_gradient(input, output, case.window, cells)

    times: dict[Way, list[float]] = {"matmul": [], "torch": []}
    with torch.autocast(case.device.type, enabled=False):
        for _ in range(ROUNDS + 1):
            for runs, step in zip(times.values(), (by_matmul, by_torch), strict=True):
                begun = _now(case.device)
                step()
                runs.append(1e3 * (_now(case.device) - begun))
    return {way: min(runs[1:]) for way, runs in times.items()}


def _now(device: torch.device) -> float:
    """Seconds, once all that the device was told to do is done."""
    torch.accelerator.synchronize(device)
    return time.perf_counter()
