"""How a network is initialised: whether it is untrained, and whether it relies on norms."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MIN_WEIGHTS = 1_000  # in all kernels; fewer can lie within the bounds by chance
MAX_STANDARD_ERRORS = 5.0  # standard errors of the mean square


def has_norms(model: nn.Module) -> bool:
    """Whether the network normalises anything, so that the size of outputs hardly matters.

    Classes are known by their names, as libraries have norms of their own: "FrozenBatchNorm2d".
    """
    return any("Norm" in type(module).__name__ for module in model.modules())


@torch.no_grad()
def output_power(kernel: Tensor) -> float:
    """The sum over output channels of the outputs' mean square, for rectified white noise.

    Let the rectified noise have mean square 1. The square of its mean is then 1 / pi, and the rest
    is variance, in which neighbours are independent. The variance is multiplied by the sum of the
    squared weights, the squared mean by the square of their sum. Input channels are taken as
    independent, as their weights are at random.

    Args:
        kernel: (out_channels, in_channels / groups, *kernel_size).
    """
    weights = kernel.double().flatten(2)
    sum_of_squares = float(weights.square().sum())
    squares_of_sums = float(weights.sum(2).square().sum())
    return sum_of_squares + (squares_of_sums - sum_of_squares) / math.pi


@torch.no_grad()
def have_torch_default_init(kernels: Iterable[Tensor]) -> bool:
    """Whether all kernels look as `torch.nn`'s convolutions leave them when they are built.

    These draw weights from the uniform distribution between -b and b, with b = 1 / sqrt(inputs of a
    kernel). A weight beyond its bound, or a mean square that a uniform distribution would not give,
    shows that the kernels are trained or were initialised otherwise. Untrained models with an
    initialisation of their own are not recognised.

    Args:
        kernels: (O, I, *kernel_size) each. On the meta device, or of other types than floats,
            nothing can be told.
    """
    count = 0
    squares = 0.0  # sum of (weight / b)^2, whose mean is 1/3 for a uniform distribution
    for kernel in kernels:
        if kernel.is_meta or not kernel.is_floating_point():
            return False
        bound = 1 / math.sqrt(kernel[0].numel())
        relative = kernel.detach().double() / bound
        rounding = torch.finfo(kernel.dtype).eps
        if float(relative.abs().max()) > 1 + rounding:
            return False
        count += kernel.numel()
        squares += float(relative.square().sum())
    if count < MIN_WEIGHTS:
        return False
    # The variance of a square is 1/5 - 1/9.
    standard_error = math.sqrt((1 / 5 - 1 / 9) / count)
    return abs(squares / count - 1 / 3) <= MAX_STANDARD_ERRORS * standard_error
