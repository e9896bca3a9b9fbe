"""Plain convolutions that pad their input by themselves, unevenly.

The attribute `kernel_size` stays the old kernel's size, because code outside may pad by it. The
weight has the size of the window.

A layer whose window grows to one side folds into one of these convolutions. With symmetric padding,
the kernel would need extra cells of zeros on the other side, and training would fill them.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..geometry import Pair, padding_with_new_cells
from .conv_classes import CONV_CLASSES, Conv
from .padding import torch_mode, widths_of


class _Padded(_ConvNd):
    """A convolution that pads by itself, unevenly."""

    widths: list[int]  # cells to pad by `pad_mode`, in the order of F.pad
    zeros: list[int]  # cells of zeros to add around them, in the same order
    pad_mode: str
    adds_zeros: bool
    convolve: Callable[..., Tensor]  # torch's function

    def forward(self, input: Tensor) -> Tensor:
        """Pad and convolve: (N, in_channels, *spatial) -> (N, out_channels, *spatial)."""
        input = F.pad(input, self.widths, mode=self.pad_mode)
        if self.adds_zeros:
            input = F.pad(input, self.zeros)
        return self.convolve(
            input, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )

    def extra_repr(self) -> str:
        """Return torch's description, plus the weight's cells and the padding, which it lacks."""
        text = super().extra_repr()  # type: ignore[no-untyped-call]
        cells = tuple(self.weight.shape[2:])
        return f"{text}, cells={cells}, widths={self.widths}, zeros={self.zeros}"


class PaddedConv1d(_Padded, nn.Conv1d):
    convolve = staticmethod(F.conv1d)


class PaddedConv2d(_Padded, nn.Conv2d):
    convolve = staticmethod(F.conv2d)


class PaddedConv3d(_Padded, nn.Conv3d):
    convolve = staticmethod(F.conv3d)


PADDED_CONVS: dict[type[Conv], type[Conv]] = {
    CONV_CLASSES[1]: PaddedConv1d,
    CONV_CLASSES[2]: PaddedConv2d,
    CONV_CLASSES[3]: PaddedConv3d,
}


def padded_conv(
    conv_class: type[Conv],
    *args: Any,
    padding: Sequence[Pair],
    new: Sequence[Pair],
    padding_mode: str,
    **kwargs: Any,
) -> Conv:
    """Make a plain convolution that pads as `padding.pad` does.

    Args:
        conv_class: The base class in torch.nn.
        padding, new, padding_mode: As in `padding.pad`.
        args, kwargs: Other arguments of the base class.
    """
    conv: Any = PADDED_CONVS[conv_class](*args, **kwargs)
    by_mode, zeros = padding_with_new_cells(padding, new, padding_mode)
    conv.widths = widths_of(by_mode)
    conv.zeros = widths_of(zeros)
    conv.adds_zeros = any(map(any, zeros))
    conv.pad_mode = torch_mode(padding_mode)
    return cast(Conv, conv)
