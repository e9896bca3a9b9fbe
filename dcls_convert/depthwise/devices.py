"""Which devices can convolve depthwise in `blocks`."""

import functools
import os
from importlib.util import find_spec

import torch
from torch.compiler import assume_constant_result

from ..progress import logger
from ..text import one_line, shortened

# Device types of GPUs. ROCm reports cuda.
GPUS = frozenset({"cuda", "mps", "xpu"})
# AMD's GPUs whose registers and shared memory suffice for blocks; NVIDIA's have them from 8.0 on.
BLOCKS_ON_AMD = frozenset({"gfx90a", "gfx942", "gfx950"})
BLOCKS_ON_NVIDIA = (8, 0)


# torch.compile can neither trace this function nor use a cache.
@assume_constant_result  # type: ignore[untyped-decorator]
def why_no_blocks(device: torch.device) -> str | None:
    """Return why `blocks` cannot be computed on this device; None if they can.

    They need Triton. On CPUs, they are only for its interpreter. The device is examined once.
    """
    return _why_no_blocks(device)


@functools.cache
def _why_no_blocks(device: torch.device) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"not for {device.type}"
    if not _has_enough_registers(device):
        return "this GPU has too few registers"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from .launching import compile_smallest_kernel

        compile_smallest_kernel(device)
    except Exception as error:  # often, a container has no C compiler, or no headers of Python
        reason = f"Triton cannot compile: {shortened(one_line(error), 200)}"
        logger.warning("%s: wide depthwise convolutions are slow, because %s", device, reason)
        return reason
    return None


def _has_enough_registers(device: torch.device) -> bool:
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0] in BLOCKS_ON_AMD
    return torch.cuda.get_device_capability(device) >= BLOCKS_ON_NVIDIA
