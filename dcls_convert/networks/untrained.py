"""Tell how a network was initialised, and how its weights and norms affect its outputs."""

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..depthwise.devices import in_double

MIN_WEIGHTS = 1_000  # in all kernels together; fewer can lie within the bounds by chance
MAX_STANDARD_ERRORS = 5.0  # largest deviation of the mean square, in its standard errors


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


@torch.no_grad()
def have_torch_default_init(kernels: Iterable[Tensor]) -> bool:
    """Return True if all kernels look like the default initialisation of `torch.nn` convolutions.

    The default is a uniform distribution between -b and b, with b = 1 / sqrt(fan-in). A weight
    beyond its bound, or a mean square that is implausible for a uniform distribution, shows that
    the kernels were trained or initialised differently. Untrained models with another
    initialisation are not recognised.

    Args:
        kernels: (O, I, *kernel_size) each. If one is on the meta device or has no floating-point
            values, the result is False.
    """
    count = 0
    sum_of_squares = 0.0  # of weight / b; their mean is 1/3 for a uniform distribution
    for kernel in kernels:
        if kernel.is_meta or not kernel.is_floating_point():
            return False
        bound = 1 / math.sqrt(kernel[0].numel())
        relative = in_double(kernel.detach()) / bound
        rounding = torch.finfo(kernel.dtype).eps
        if float(relative.abs().max()) > 1 + rounding:
            return False
        count += kernel.numel()
        sum_of_squares += float(relative.square().sum())
    if count < MIN_WEIGHTS:
        return False
    # For u uniform between -1 and 1, u^2 has the variance 1/5 - 1/9.
    standard_error = math.sqrt((1 / 5 - 1 / 9) / count)
    return abs(sum_of_squares / count - 1 / 3) <= MAX_STANDARD_ERRORS * standard_error
