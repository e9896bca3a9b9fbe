"""Find values for new layers, before they are put into the model, from the kernels they replace.

Axes: O output channels, I input channels per group, D cells of the dense axes, E kernel elements, A
learnt axes.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..depthwise.devices import in_double
from ..geometry import position_limits
from ..layers.elements import Elements, first_cells, random_positions
from ..options import Init, Positions
from ..placing.place import LayerGroup
from ..planning.layer_plan import common_useful_limits
from ..progress import Notify
from .boxes import Box
from .calibration import CalibrationStatistics
from .fit import fit_elements

# Norms are recognised by their class names, since libraries define their own, such as
# "FrozenBatchNorm2d". The pattern excludes classes that are no norms: weight norm, spectral norm,
# torchvision's Normalize and timm's NormFreeNet. It also excludes LocalResponseNorm, which keeps
# the scale.
NORM_CLASS = re.compile(r"(?<!Weight)(?<!Spectral)(?<!LocalResponse)Norm(?!al|Free)")


def start_randomly_(
    model: nn.Module,
    groups: Sequence[LayerGroup],
    positions: Positions,
    generator: torch.Generator,
) -> None:
    """Draw random positions, and take cells of the old kernels as weights.

    In a model without norms, the weights are scaled so that outputs keep their mean square.
    """
    for group in groups:
        _fill_randomly_(group, positions, generator)
    if not has_norms(model):
        _scale_to_old_kernels_(groups)


def take_elements_(groups: Sequence[LayerGroup], elements: Mapping[str, Tensor]) -> None:
    """Give the layers existing weights, positions and sigmas, by their names in the model."""
    for group in groups:
        for plan, layer in zip(group.layer_plans, group.layers, strict=True):
            layer.weight.copy_(elements[f"{plan.name}.weight"])
        first = group.layers[0]
        for parameter, name in group.layer_plans[0].position_names.items():
            getattr(first, parameter).copy_(elements[name])


def _fill_(group: LayerGroup, elements: Elements) -> None:
    weights, positions = elements
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)
    group.layers[0].positions.copy_(positions)  # shared by all layers of the group


def _fill_randomly_(group: LayerGroup, positions: Positions, generator: torch.Generator) -> None:
    """Draw random positions, and take the first cells of the old kernels as weights."""
    plan = group.layer_plans[0]
    weights = []
    for conv in group.convs:
        weights.append(first_cells(conv.weight.detach(), plan.kernel_count, plan.dense_axes))
    limits = list(map(position_limits, plan.learnt_size))
    centre = None
    if positions == "normal":
        centre = plan.old_centre
    elif positions == "kernel":
        limits = plan.old_limits
    else:
        limits = common_useful_limits(group.layer_plans)
    _fill_(group, (weights, random_positions(weights[0], limits, generator, centre=centre)))


def _scale_to_old_kernels_(groups: Sequence[LayerGroup]) -> None:
    """Scale weights so that outputs have the same mean square as with the old kernels.

    Without scaling, the mean square would be smaller: there are fewer elements than cells, and each
    element is spread over several cells.
    """
    for group in groups:
        for old_kernel, layer in zip(group.effective_kernels(), group.layers, strict=True):
            if layer.weight.is_meta:
                continue
            power = output_power(layer.kernel())
            if power > 0:  # some models initialise kernels with zeros
                layer.weight.mul_(math.sqrt(output_power(old_kernel) / power))


def has_norms(model: nn.Module) -> bool:
    """True if the network has a norm, so that the scale of outputs hardly matters."""
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


def start_from_kernels_(
    groups: Sequence[LayerGroup],
    statistics: CalibrationStatistics | None,
    init: Init,
    notify: Notify,
) -> None:
    """Give the layers the largest cells of the old kernels, or fit elements to them.

    `notify` is called before each group, with the layers that are next.
    """
    layer_count = 0
    total_weights = 0
    for group in groups:
        layer_count += len(group.layer_plans)
        total_weights += _dense_weights(group)
    first = 1  # number of the group's first layer
    done_weights = 0  # the time for a group grows with its dense weights
    for group in groups:
        last = first + len(group.layer_plans) - 1
        which = f"layers {first} to {last}"
        if last == first:
            which = f"layer {last}"
        notify(f"fitting {group.title}, {which} of {layer_count}", done_weights, total_weights)
        cost_roots = None
        if statistics is not None:
            cost_roots = statistics.cost_roots(group)
        _fill_from_kernels_(group, cost_roots, init)
        first = last + 1
        done_weights += _dense_weights(group)


def _dense_weights(group: LayerGroup) -> int:
    return sum(plan.dense_weights for plan in group.layer_plans)


def _fill_from_kernels_(group: LayerGroup, cost_roots: Tensor | None, init: Init) -> None:
    """Fill the layers with the largest cells of the old kernels, or with fitted elements.

    Args:
        cost_roots: Square root of the covariance of the patches of each input channel,
            (in_channels, S, S) with S cells of the box. With roots, elements are fitted to outputs,
            else to kernels.
    """
    count = group.layer_plans[0].kernel_count
    effective = group.effective_kernels()
    kernels = [conv.weight.detach() for conv in group.convs]
    box = Box.of(group.layer_plans[0])
    largest = box.largest_cells(kernels, count, effective=effective)
    if init != "fit":
        _fill_(group, largest)
        return
    fitted = fit_elements(effective, box, kernel_count=count, cost_roots=cost_roots)
    _fill_(group, fitted)
    if any(layer.traits.transform_weight for layer in group.layers):
        # Weight standardisation transforms the elements and can undo the fit.
        error_of_fit = sum(group.kernel_errors().values())
        _fill_(group, largest)
        if error_of_fit < sum(group.kernel_errors().values()):
            _fill_(group, fitted)
