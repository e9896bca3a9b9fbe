"""How norms and weights determine the scale of a network's outputs."""

import math
import re

import torch
from torch import Tensor, nn

from ..depthwise.devices import in_double

# Norms are recognised by their class names, since libraries define their own, such as
# "FrozenBatchNorm2d". Other classes have such names, too: those of weight norm and spectral norm,
# torchvision's Normalize, and timm's NormFreeNet. LocalResponseNorm keeps the scale.
NORM_CLASS = re.compile(r"(?<!Weight)(?<!Spectral)(?<!LocalResponse)Norm(?!alize|Free)")


def has_norms(model: nn.Module) -> bool:
    """Return True if the network has a norm, so that the scale of outputs hardly matters."""
    return any(NORM_CLASS.search(type(module).__name__) for module in model.modules())


@torch.no_grad()
def output_power(kernel: Tensor) -> float:
    """Return the mean square of the outputs, summed over output channels, for rectified noise.

    The input is white noise, rectified and scaled to mean square 1. Its squared mean is then
    1 / pi; the rest is variance, independent between neighbouring cells. The variance is multiplied
    by the sum of the squared weights, the squared mean by the square of their sum. Input channels
    are treated as independent, since their weights are random.

    Args:
        kernel: (out_channels, in_channels / groups, *kernel_size).
    """
    weights = in_double(kernel).flatten(2)
    sum_of_squares = float(weights.square().sum())
    squares_of_sums = float(weights.sum(2).square().sum())
    return sum_of_squares + (squares_of_sums - sum_of_squares) / math.pi
