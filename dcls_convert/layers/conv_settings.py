"""Read the settings of a convolution or a DCLS layer from its attributes, as torch uses them.

The attributes may have been set after construction. This module imports no torch.
"""

from dataclasses import dataclass, fields
from typing import Any

from ..geometry import Padding, as_padding, extent, on_every_axis, plain_numbers, size_text

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


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
    # Name of the function by which the class transforms the weight: see `register_conv`.
    transform: str = "nothing"

    @property
    def extents(self) -> tuple[int, ...]:
        """Cells that the kernel spans, on each axis."""
        return tuple(map(extent, self.kernel_size, self.dilation))

    def describe_difference(self, planned: "ConvSettings") -> str | None:
        """Describe a setting that is not as planned: "stride is (2, 2), the plan has (1, 1)".

        Return None if all settings are as planned. Settings that the plan does not state (see
        `LayerPlan`) are not compared.
        """
        for setting in fields(ConvSettings):
            found = getattr(self, setting.name)
            stated = getattr(planned, setting.name)
            if found != stated and stated not in ((), ""):
                return f"{setting.name} is {found!r}, the plan has {stated!r}"
        return None


def dims_of(conv: Any) -> int:
    """Return the number of spatial axes of a convolution of torch.nn, or of a DCLS layer."""
    if hasattr(conv, "dilated_kernel_size"):
        return len(conv.dilated_kernel_size)
    return len(conv.output_padding)


def own_settings(conv: Any, traits: Any = None) -> ConvSettings:
    """Return the settings of a convolution, or of a DCLS layer.

    The padding is the one that the attributes state. The class may also pad in `forward`: see
    `conv_classes.settings_of`. For a convolution, `traits` are the traits of its class (see
    `find_traits`); a layer has them as an attribute.
    """
    dims = dims_of(conv)
    in_channels, out_channels, groups = plain_numbers(
        (conv.in_channels, conv.out_channels, conv.groups)
    )
    stored = getattr(conv, "_reversed_padding_repeated_twice", None)
    padding: Padding = conv.padding
    if stored is not None and conv.padding_mode != "zeros":
        # In these modes, torch pads by numbers that it stored when the convolution was made,
        # whatever `padding` says now: cells before and after each axis, the last axis first.
        padding = as_padding(list(zip(stored[::2], stored[1::2], strict=True))[::-1])
    elif not isinstance(padding, str):
        padding = on_every_axis(padding, dims)
    transform = getattr(traits or getattr(conv, "traits", None), "transform_weight", None)
    transform_name = "nothing"
    if transform is not None:
        transform_name = getattr(transform, "__name__", type(transform).__name__)
    return ConvSettings(
        in_channels=in_channels,
        out_channels=out_channels,
        groups=groups,
        bias=conv.bias is not None,
        kernel_size=on_every_axis(conv.kernel_size, dims),
        dilation=on_every_axis(conv.dilation, dims),
        stride=on_every_axis(conv.stride, dims),
        padding=padding,
        padding_mode=conv.padding_mode,
        transform=transform_name,
    )


def why_contradictory(conv: Any) -> str | None:
    """Return a reason if the padding mode is unknown, or attributes contradict the weight."""
    if conv.padding_mode not in PADDING_MODES:
        return f"its padding mode {conv.padding_mode!r} is none of {', '.join(PADDING_MODES)}"
    channels = plain_numbers((conv.out_channels, conv.in_channels // conv.groups))
    stated = (*channels, *on_every_axis(conv.kernel_size, dims_of(conv)))
    shape = tuple(conv.weight.shape)
    if shape == stated:
        return None
    return f"its weight is {size_text(shape)}, but its attributes state {size_text(stated)}"
