"""Depthwise convolution of two axes in the fastest way known: same outputs and gradients as torch's, sooner.

Axes: N batch, C channels, H x W a map, R x S the window.

WAYS is the table of the ways beside torch's own. Its rules choose. The rule for GPUs is an estimate, since nothing was
timed there; so it is put to the test where torch times its own ways, too (`torch.backends.cudnn.benchmark`).
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import assume_constant_result

from ..errors import DclsConvertError, did_you_mean, shown
from . import matmul, onednn
from .eager import is_channels_last, is_compiled, is_eager, is_watched
from .geometry import Padding, size_text

Pair = tuple[int, int]
Way = Literal["torch", "onednn", "matmul"]
Preference = Literal["auto", "torch", "matmul"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"
GPUS = frozenset({"cuda", "mps", "xpu"})  # ROCm's are called cuda, too
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
FEWEST_CELLS = 81  # in windows that go as matrix products on GPUs: an estimate, like all that is known of GPUs
LARGEST_WINDOW = 51  # cells of a side; matrix products were not tested with larger ones
MARGIN = 1.15  # by which matrix products must win where they are timed
ROUNDS = 3  # of timing, after one for warmth


@dataclass(frozen=True, kw_only=True)
class Case:
    """A depthwise convolution without dilation, by what the choice of a way depends on."""

    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    channels: int
    map_size: Pair
    window: Pair
    kernels: int  # in all; `channels` of them, or a multiple
    stride: Pair
    padding: Pair | None  # cells on either side; None for 'same' with an even window, which is uneven


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way that a case goes on a GPU, for the rest of the process."""

    case: Case
    batch: int  # the largest power of two that is not larger
    way: Way
    milliseconds: dict[Way, float]  # of a forward pass and both gradients; empty where nothing was timed

    def __str__(self) -> str:
        case, times = self.case, ", ".join(f"{way} {ms:.3g} ms" for way, ms in self.milliseconds.items())
        sizes = f"window {size_text(case.window)} on {case.channels} channels of {size_text(case.map_size)}"
        kind = f"{case.dtype}{', channels_last' * case.channels_last}, batch from {self.batch}"
        return f"{case.device}, {sizes}, {kind}: {self.way} ({times or 'not timed'})"


_chosen: dict[tuple[Case, int], Choice] = {}


def choices() -> tuple[Choice, ...]:
    """What was chosen in this process for windows that may go as matrix products on a GPU, in order of appearance."""
    return tuple(_chosen.values())


@dataclass(frozen=True, kw_only=True)
class _Way:
    computes: Callable[[Case], bool]
    pays: Callable[[Case], bool]  # where it computes
    compiles: bool  # whether compiled programs go it, too; otherwise the compiler chooses
    convolve: Callable[[Tensor, Tensor, Tensor | None, Pair, Pair], Tensor]  # input, kernel, bias, stride, padding


def _multiplies(case: Case) -> bool:
    if case.padding is None or case.kernels != case.channels or case.stride != (1, 1):
        return False
    sizes = zip(case.map_size, case.padding, case.window, strict=True)
    fits = all(size + 2 * cells >= taps for size, cells, taps in sizes) and max(case.window) <= LARGEST_WINDOW
    return fits and case.dtype in FLOATS and (case.device.type == "cpu" or case.device.type in GPUS)


WAYS: dict[Way, _Way] = {
    "matmul": _Way(
        computes=_multiplies,
        pays=lambda case: case.device.type in GPUS and case.window[0] * case.window[1] >= FEWEST_CELLS,
        compiles=True,
        convolve=matmul.depthwise,
    ),
    "onednn": _Way(
        computes=lambda case: case.device.type == "cpu" and case.dtype in onednn.DTYPES and case.padding is not None,
        pays=lambda case: onednn.most_columns() is not None,
        compiles=False,
        convolve=onednn.depthwise,
    ),
}


def conv2d(
    input: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """`torch.nn.functional.conv2d`, with the same values, memory format and gradients of any order.

    Depthwise convolutions go the way that `depthwise_way` says, but not under torch.func's transforms, nor in exported
    and traced programs, which hold torch's convolution; on CPUs also in compiled ones, where the compiler chooses.
    """
    tensors = [input, kernel] if bias is None else [input, kernel, bias]
    eager = is_eager(*tensors)
    if input.dim() == 4 and (eager or is_compiled(*tensors)):
        dtype, cells = _computed_dtype(tensors), _cells(padding, kernel.shape)
        geometry = (input.shape, kernel.shape, stride, padding, dilation, groups)
        seen = (input, kernel) if eager else None
        way = depthwise_way(input.device, dtype, is_channels_last(input), *geometry, tensors=seen)
        if way != "torch" and (eager or WAYS[way].compiles):
            input, kernel, *rest = (tensor.to(dtype) for tensor in tensors)  # what autocast does
            bias = rest[0] if rest else None
            return WAYS[way].convolve(input, kernel, bias, cast(Pair, tuple(stride)), cast(Pair, cells))
    return F.conv2d(input, kernel, bias, cast(Any, stride), cast(Any, padding), cast(Any, dilation), groups)


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
    """The way that `conv2d` takes for input_size (N, C, H, W) and kernel_size (O, C / groups, R, S).

    "matmul" for windows of 81 cells and more on GPUs, "onednn" on x86 CPUs; "torch" everywhere else, where a
    convolution is not depthwise, and where it would fail. DCLS_CONVERT_DEPTHWISE=torch overrules, and so does =matmul
    where matrix products can compute it. What was chosen for a case on a GPU holds for the process, since a block of
    layers that is computed again, from a checkpoint, must be computed in the same way.

    Args:
        dtype: In which it is computed: autocast's where that is on; None where tensors differ.
        tensors: Input and kernel, to choose by at first sight; without them, nothing is timed or kept.

    Raises:
        DclsConvertError: The environment variable is set to something else.
    """
    preferred = preference()
    is_depthwise = kernel_size[1] == 1 and groups == input_size[1] and tuple(dilation) == (1, 1)
    if preferred == "torch" or not is_depthwise or not all(input_size) or dtype is None:
        return "torch"
    case = Case(
        device=device,
        dtype=dtype,
        channels_last=channels_last,
        channels=input_size[1],
        map_size=(input_size[2], input_size[3]),
        window=(kernel_size[2], kernel_size[3]),
        kernels=kernel_size[0],
        stride=cast(Pair, tuple(stride)),
        padding=_cells(padding, kernel_size),
    )
    for name, way in WAYS.items():
        if way.computes(case) and (preferred == name or way.pays(case)):
            undecided = name == "matmul" and preferred == "auto" and not torch.compiler.is_compiling()
            return _choose(case, input_size[0], tensors) if undecided else name
    return "torch"


def _cells(padding: Padding, kernel_size: Sequence[int]) -> Pair | None:
    """Padding as cells on either side of rows and columns; None for 'same' with an even window, which is uneven."""
    if padding == "valid":
        return (0, 0)
    if padding == "same":
        rows, columns = kernel_size[2:]
        return (rows // 2, columns // 2) if rows % 2 and columns % 2 else None
    return cast(Pair, tuple(padding))


def _computed_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype in which torch would convolve these; None where they differ."""
    device, dtypes = tensors[0].device.type, {tensor.dtype for tensor in tensors}
    known = device == "cpu" or device in GPUS
    if known and torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    return tensors[0].dtype if len(dtypes) == 1 else None


@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """What the environment variable DCLS_CONVERT_DEPTHWISE asks for; "auto" where it is not set.

    Raises:
        DclsConvertError: It is set to something else than auto, torch or matmul.
    """
    asked = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if asked not in allowed:
        hint = did_you_mean(asked, allowed)
        raise DclsConvertError(f"environment: {VARIABLE}={shown(asked)!r} must be auto, torch or matmul{hint}")
    return cast(Preference, asked)


# What is chosen at first sight.


def _choose(case: Case, batch: int, tensors: tuple[Tensor, Tensor] | None) -> Way:
    key = case, batch.bit_length()
    choice = _chosen.get(key)
    if choice is None and tensors is not None:
        times = _time(case, *tensors) if _may_time(case.device) else {}
        wins = not times or times["torch"] >= MARGIN * times["matmul"]
        way: Way = "matmul" if wins else "torch"
        made = Choice(case=case, batch=1 << batch.bit_length() - 1, way=way, milliseconds=times)
        choice = _chosen.setdefault(key, made)  # another thread may have been faster
    return "matmul" if choice is None else choice.way


def _may_time(device: torch.device) -> bool:
    """Whether the user asks for timing, and nothing would see or forbid it: a graph capture, a mode of torch's."""
    asked = torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return asked and not capturing and not is_watched()


@torch.no_grad()
def _time(case: Case, input: Tensor, kernel: Tensor) -> dict[Way, float]:
    """Milliseconds of a forward pass and both gradients. Without autograd: hooks of the user's see nothing of it."""
    input, kernel, cells = input.to(case.dtype), kernel.to(case.dtype), cast(Pair, case.padding)

    def by_torch() -> None:
        output = F.conv2d(input, kernel, padding=cells, groups=case.channels)
        torch.ops.aten.convolution_backward(
            *(output, input, kernel, None, [1, 1], cells, [1, 1], False, [0, 0], case.channels), [True, True, False]
        )

    def by_matmul() -> None:
        output = matmul.convolve(input, kernel, cells)
        matmul.input_gradient(output, kernel, cells)
        matmul.kernel_gradient(input, output, case.window, cells)

    steps: dict[Way, Callable[[], None]] = {"matmul": by_matmul, "torch": by_torch}
    times: dict[Way, list[float]] = {way: [] for way in steps}
    with torch.autocast(case.device.type, enabled=False):
        for _ in range(ROUNDS + 1):
            for way, step in steps.items():
                begun = _now(case.device)
                step()
                times[way].append(1e3 * (_now(case.device) - begun))
    return {way: min(runs[1:]) for way, runs in times.items()}


def _now(device: torch.device) -> float:
    """Seconds, once all that the device was told to do is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
