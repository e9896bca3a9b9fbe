"""Read what a convolution, or a DCLS layer, states about itself, as torch uses it.

Its settings are attributes, which may be set after construction. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..geometry import (
    Padding,
    as_padding,
    extent,
    on_every_axis,
    plain_numbers,
    size_text,
    static_padding,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSettings:
    """What a convolution does with its weight. Axes are in the order of tensor.shape."""

    in_channels: int
    out_channels: int
    groups: int
    bias: bool
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    padding_mode: str

    @property
    def extents(self) -> tuple[int, ...]:
        """Cells that the kernel spans, on each axis."""
        return tuple(map(extent, self.kernel_size, self.dilation))


def dims_of(conv: Any) -> int:
    """Return the number of spatial axes of a convolution of torch.nn, or of a DCLS layer."""
    if hasattr(conv, "dilated_kernel_size"):
        return len(conv.dilated_kernel_size)
    return len(conv.output_padding)


def own_settings(conv: Any) -> ConvSettings:
    """Return the settings of a convolution, or of a DCLS layer.

    The padding is that of `conv` itself; its class may pad in `forward`, too: see
    `conv_classes.settings_of`.
    """
    dims = dims_of(conv)
    padding: Padding = conv.padding
    if not isinstance(padding, str):
        padding = on_every_axis(padding, dims)
    settings = ConvSettings(
        in_channels=plain_numbers(conv.in_channels),
        out_channels=plain_numbers(conv.out_channels),
        groups=plain_numbers(conv.groups),
        bias=conv.bias is not None,
        kernel_size=on_every_axis(conv.kernel_size, dims),
        dilation=on_every_axis(conv.dilation, dims),
        stride=on_every_axis(conv.stride, dims),
        padding=padding,
        padding_mode=conv.padding_mode,
    )
    widths = getattr(conv, "_reversed_padding_repeated_twice", None)
    if widths is None or settings.padding_mode == "zeros":
        return settings
    return replace(settings, padding=_used_padding(padding, widths, settings.extents))


def _used_padding(stated: Padding, widths: Sequence[int], extents: Sequence[int]) -> Padding:
    """Return the stated padding, or what torch stored at construction, if they differ.

    With a mode other than zeros, torch's convolutions use what they stored.

    Args:
        stated: The attribute.
        widths: What is stored: before and after each axis, the last axis first.
        extents: The kernel's.
    """
    pairs = [(widths[2 * axis], widths[2 * axis + 1]) for axis in range(len(extents))]
    pairs.reverse()
    return stated if static_padding(stated, extents) == pairs else as_padding(pairs)


def why_contradictory(conv: Any) -> str | None:
    """Return which attributes contradict the shape of a convolution's weight; None if none do."""
    settings = own_settings(conv)
    channels = (settings.out_channels, settings.in_channels // settings.groups)
    stated = (*channels, *settings.kernel_size)
    shape = tuple(conv.weight.shape)
    if shape == stated:
        return None
    return f"its weight is {size_text(shape)}, but its attributes state {size_text(stated)}"
