"""A convolution in plain values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import Pair, size_text
from .devices import AUTOCAST_DEVICES


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A convolution in plain values; arguments are as in `F.conv2d`."""

    device: torch.device
    dtype: torch.dtype  # in which it is computed
    input_shape: tuple[int, ...]  # (N, C, H, W)
    kernel_shape: tuple[int, ...]  # (O, C / groups, R, S)
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]  # "same" only if the two sides of an axis differ
    dilation: tuple[int, ...]
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


def computed_dtype(input: Tensor, kernel: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Return the dtype in which torch would convolve an input with a kernel.

    None if their dtypes or devices differ.
    """
    others = [kernel] if bias is None else [kernel, bias]
    dtypes = {input.dtype, *[tensor.dtype for tensor in others]}
    if any(tensor.device != input.device for tensor in others):
        return None  # torch's convolution refuses this; kernels would read the wrong memory
    device = input.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        if torch.float64 not in dtypes:
            return torch.get_autocast_dtype(device)
    return input.dtype if len(dtypes) == 1 else None
