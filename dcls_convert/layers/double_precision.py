"""Computing in float64 on devices that may not have it."""

import torch
from torch import Tensor

DEVICE_TYPES_WITHOUT_FLOAT64 = ("mps",)


def in_double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64: on its device, or on the CPU if its device has no float64."""
    if tensor.device.type in DEVICE_TYPES_WITHOUT_FLOAT64:
        tensor = tensor.cpu()
    return tensor.to(torch.float64)
