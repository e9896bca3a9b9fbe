"""What timm's convolution classes do besides convolving: SAME padding and weight standardisation."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from .conv_classes import register_conv


def register_timm_convs() -> None:
    """Register timm's convolution classes."""
    from timm.layers.conv2d_same import Conv2dSame
    from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame

    register_conv(Conv2dSame, same_padding=True)
    register_conv(StdConv2d, weight=standardised)
    register_conv(StdConv2dSame, weight=standardised, same_padding=pads_same)
    scaled: dict[str, Any] = {"weight": scaled_standardised, "parameters": ["gain"], "adapt": rescale_for_fan_in_}
    register_conv(ScaledStdConv2d, **scaled)
    register_conv(ScaledStdConv2dSame, same_padding=pads_same, **scaled)


def pads_same(conv: Any) -> bool:
    """Whether this object pads in its forward. It does not if the padding is the same for every input size."""
    return bool(conv.same_pad)


def standardised(conv: Any, weight: Tensor) -> Tensor:
    """Filters (O, I, ...), each with mean 0 and variance 1; same shape. Weight standardisation, arXiv:1903.10520."""
    over = tuple(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dim=over, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + conv.eps)


def scaled_standardised(conv: Any, weight: Tensor) -> Tensor:
    """`standardised` times a learnt gain and 1/sqrt(fan-in). Scaled weight standardisation, arXiv:2101.08692."""
    gain = (conv.gain * conv.scale).reshape(-1, *[1] * (weight.dim() - 1))
    return cast(Tensor, standardised(conv, weight) * gain)


def rescale_for_fan_in_(conv: Any, layer: Any) -> None:
    """Adapt timm's factor 1/sqrt(fan-in): a kernel had its cells as fan-in, the layer has its elements."""
    layer.scale = conv.scale * math.sqrt(conv.weight[0].numel() / layer.weight[0].numel())


def same_padded_conv(*args: Any, **kwargs: Any) -> nn.Conv2d:
    """timm's convolution with dynamic SAME padding."""
    from timm.layers.conv2d_same import Conv2dSame

    return Conv2dSame(*args, **kwargs)
