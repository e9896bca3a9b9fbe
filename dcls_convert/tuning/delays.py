"""Train delays: elements of windows that look back in time, which become shifts by whole steps.

A Gaussian element with a large sigma sees many steps at once, so its position finds the step that
matters; then sigma shrinks, and in the end positions are rounded. Source: Hammouamri, Khalfaoui-
Hassani, Masquelier, "Learning Delays in Spiking Neural Networks using Dilated Convolutions with
Learnable Spacings", arXiv:2306.17670.
"""

import math
from numbers import Real
from typing import cast

import torch
from torch import nn

from ..errors import DclsConvertError, check_argument
from ..layers.dcls_conv import DclsConvNd
from ..layers.interpolation import INTERPOLATIONS
from ..layers.position_parameters import exclude_from_weight_decay_, position_parameters
from ..networks.wrappers import inside_wrappers

GAUSSIAN = "gaussian"
INITIAL_SIGMA = cast(float, INTERPOLATIONS[GAUSSIAN].initial_sigma)
LEAST_SIGMA = cast(float, INTERPOLATIONS[GAUSSIAN].min_sigma)
ROUNDED = "bilinear"  # an element on a cell lies in this cell alone


@torch.no_grad()
def shrink_sigma_(model: nn.Module, progress: float, last: float = INITIAL_SIGMA) -> None:
    """Set the sigmas of all layers: during a training, they shrink from half the window to `last`.

    The part above the least sigma shrinks by a constant factor from step to step. Sigmas are no
    longer trained: call this function once before you make the optimizer and DDP. If the first
    quarter of 150 epochs is to shrink sigmas, call it at the start of every epoch::

        dcls_convert.tuning.shrink_sigma_(model, epoch / (150 // 4))

    Args:
        model: Has Gaussian elements. May be wrapped (DDP, `torch.compile`).
        progress: 0 for half the window; from 1 on, the last sigma.
        last: The last sigma, in steps. It must be above 0.27, the least sigma of a layer. The
            default is the authors'. With 0.3, an element on a cell has 99 % of its weight there,
            instead of 79 %: rounding hardly changes outputs, but positions learn slowly.

    Raises:
        DclsConvertError: `progress` is not a finite number of at least 0, `last` is not above 0.27,
            or no layer has Gaussian elements.
    """
    check_argument("model", model, nn.Module)
    if not (isinstance(progress, Real) and math.isfinite(progress) and progress >= 0):
        raise DclsConvertError(f"progress={progress!r} must be a finite number of at least 0")
    if not (isinstance(last, Real) and math.isfinite(last) and last > LEAST_SIGMA):
        raise DclsConvertError(f"last={last!r} must be a finite number above {LEAST_SIGMA}")
    parameters = []
    for parameter in position_parameters(inside_wrappers(model), "sigma"):
        if next(iter(parameter.layers.values())).interpolation == GAUSSIAN:
            parameters.append(parameter)
    if not parameters:
        raise DclsConvertError("the model has no Gaussian elements; convert it with gaussian")
    excess = last - LEAST_SIGMA
    for parameter in parameters:
        parameter.tensor.requires_grad_(False)
        for sigma, size in zip(parameter.tensor, parameter.learnt_size, strict=True):
            first = max(size // 2, excess)
            sigma.fill_(LEAST_SIGMA + first * (excess / first) ** min(progress, 1.0))


@torch.no_grad()
def round_positions_(model: nn.Module) -> None:
    """Round all positions to whole cells, so that each element lies in a single cell.

    Layers become bilinear, without sigmas, and their positions are no longer trained. Outputs
    change where elements lay between cells or were wider than a cell. Afterwards, `save_converted`
    takes the plan of the conversion as before.

    Args:
        model: Changed in place. May be wrapped; DDP must be made anew to train on.

    Raises:
        DclsConvertError: The model has no DCLS layers.
    """
    check_argument("model", model, nn.Module)
    network = inside_wrappers(model)
    parameters = position_parameters(network, "positions")
    if not parameters:
        raise DclsConvertError("the model has no DCLS layers")
    for parameter in parameters:
        parameter.tensor.round_().requires_grad_(False)
        parameter.tensor.grad = None  # or an optimizer would move it once more
    for layer in network.modules():
        if isinstance(layer, DclsConvNd):
            layer.set_interpolation_(ROUNDED)
    exclude_from_weight_decay_(network)
