"""What devices can do: float64, autocast, and convolving depthwise in `blocks`."""

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.compiler import assume_constant_result

from ..progress import logger
from ..text import one_line, shortened

# Device types of GPUs. ROCm reports cuda.
GPUS = frozenset({"cuda", "mps", "xpu"})
AUTOCAST_DEVICES = GPUS | {"cpu"}
DEVICE_TYPES_WITHOUT_FLOAT64 = ("mps",)
MIN_CUDA_CAPABILITY = (8, 0)  # GPUs with fewer registers are too small for blocks
# Major compute capabilities whose tensor cores read shared memory, and so need fewer registers, and
# that have 96 KB of it for each program.
THREE_TAPS_ON_NVIDIA = frozenset({9, 10})


def in_double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64: on its device, or on the CPU if its device has no float64."""
    if tensor.device.type in DEVICE_TYPES_WITHOUT_FLOAT64:
        tensor = tensor.cpu()
    return tensor.to(torch.float64)


# torch.compile can neither trace this function nor use a cache.
@assume_constant_result  # type: ignore[untyped-decorator]
def why_no_blocks(device: torch.device) -> str | None:
    """Return why `blocks` cannot be computed on this device; None if they can.

    Blocks need Triton and an NVIDIA GPU; on a CPU, they run only in Triton's interpreter. A device
    is examined once. If the GPU is suitable and only software is missing, a warning says what.
    """
    return _why_no_blocks(device)


@functools.cache
def _why_no_blocks(device: torch.device) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"not for {device.type}"
    if torch.version.hip:
        return "not for AMD's GPUs"
    if torch.cuda.get_device_capability(device) < MIN_CUDA_CAPABILITY:
        return "this GPU has too few registers"
    reason = _why_triton_fails(device)
    if reason is not None:
        logger.warning("%s: wide depthwise convolutions are slow, because %s", device, reason)
    return reason


def _why_triton_fails(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        _compile_a_kernel(device)
    except Exception as error:  # often, a container has no C compiler, or no headers of Python
        return f"Triton cannot compile: {shortened(one_line(error), 200)}"
    return None


def _compile_a_kernel(device: torch.device) -> None:
    """Compile and load a kernel; any exception says what is missing."""
    from .element_kernels import element_gradients_of_windows

    tensors = [torch.float32] * 5
    with torch.cuda.device(device):
        program = element_gradients_of_windows.warmup(*tensors, 1, 1, 3, 3, grid=(1, 1, 1))
        program[1, 1, 1]  # loads the program and its launcher


@assume_constant_result  # type: ignore[untyped-decorator]
def adds_three_taps(device: torch.device) -> bool:
    """True if programs of 16-bit products have room for the gradients of three taps at once."""
    if device.type == "cpu":  # in Triton's interpreter
        return True
    return torch.cuda.get_device_capability(device)[0] in THREE_TAPS_ON_NVIDIA


@assume_constant_result  # type: ignore[untyped-decorator]
def float32_precision() -> str:
    """Return how products of float32 are computed: in TF32 if torch's own products may use it."""
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9; reading the older setting may then raise
        allows_tf32 = matmul.fp32_precision == "tf32"
    else:
        allows_tf32 = matmul.allow_tf32
    return "tf32" if allows_tf32 else "tf32x3"
