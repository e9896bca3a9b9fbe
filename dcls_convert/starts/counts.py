"""Scope "error": choose a kernel count for each tie group that minimises the sum of layer errors.

Kernel lines are defined in `layers/elements.py`.
"""

import math
from collections.abc import Collection, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..networks.running import full_precision
from ..options import ERROR_SCOPE
from ..placing.place import LayerGroup, make_layers
from ..planning.counts import LayerCounts
from ..planning.plan import ConversionPlan
from ..progress import Notify
from .allocation import COUNT_SETTINGS, GroupErrors, counts_of_min_error
from .boxes import Box
from .calibrate import CalibrationStatistics, measure_inputs
from .images import Calibration
from .warm_start import fit_elements, relative_errors


@full_precision()
def choose_counts_by_error(
    model: nn.Module,
    model_plan: ConversionPlan,
    *,
    seed: int,
    calibration: Calibration | None,
    notify: Notify,
) -> tuple[LayerCounts, CalibrationStatistics | None]:
    """Choose kernel counts with the least sum of relative layer errors, within the model's budget.

    Errors of outputs are summed if there are images, else errors of kernels. Counts that rules
    state are kept.

    Args:
        model: The network, with its kernels.
        model_plan: Its plan for the scope "model": the layers, their windows and the budget.
        seed: For the starting points of fits.
        calibration: Images, or None.
        notify: Called with what is being done.

    Returns:
        The counts, and the statistics of the images (None without images).

    Raises:
        PlanError: The model is on the meta device.
    """
    groups = make_layers(model, model_plan)
    _refuse_meta_model(groups)
    statistics = None
    if calibration is not None:
        statistics = measure_inputs(model, groups, calibration, notify)
    free_groups, limit = _free_groups(groups, model_plan)
    group_errors: list[GroupErrors] = []
    for number, group in enumerate(free_groups):
        progress = f"{number + 1} of {len(free_groups)}"
        notify(f"measuring errors of {group.title}, {progress}", number, len(free_groups))
        covariance_roots = None
        if statistics is not None:
            covariance_roots = statistics.covariance_roots(group)
        usual_counts = {group.layer_plans[0].kernel_count, _own_count(group, model_plan.share)}
        group_errors.append(_group_errors(group, usual_counts, covariance_roots, seed))
    counts = {layer.name: layer.kernel_count for layer in model_plan.layers}
    if free_groups:
        chosen = counts_of_min_error(group_errors, limit)
        for group, count in zip(free_groups, chosen, strict=True):
            for layer in group.layer_plans:
                counts[layer.name] = count
    return LayerCounts(source=f"scope {ERROR_SCOPE}", counts=counts), statistics


def _free_groups(
    groups: Sequence[LayerGroup], model_plan: ConversionPlan
) -> tuple[list[LayerGroup], int]:
    """Return the groups whose counts no rule states, and the parameters that are left for them."""
    limit = model_plan.budget.limit
    free_groups: list[LayerGroup] = []
    for group in groups:
        if group.layer_plans[0].count_is_stated:
            limit -= _cost(group) * group.layer_plans[0].kernel_count
        else:
            free_groups.append(group)
    return free_groups, limit


def _refuse_meta_model(groups: Sequence[LayerGroup]) -> None:
    for group in groups:
        for conv in group.convs:
            if conv.weight.is_meta:
                raise PlanError(
                    f"scope {ERROR_SCOPE!r} compares kernels, "
                    "which a model on the meta device does not have"
                )


def _own_count(group: LayerGroup, share: Fraction) -> int:
    """Return the count that this share of the group's own dense weights pays for, at least 1."""
    dense_weights = sum(layer.dense_weights for layer in group.layer_plans)
    count = math.floor(share * dense_weights / _cost(group))
    return max(1, min(count, group.layer_plans[0].cells))


def _cost(group: LayerGroup) -> int:
    """Return the parameters that one more element per kernel adds, over all layers."""
    first = group.layer_plans[0]
    return first.lines * (len(group.layer_plans) + first.coordinates_per_element)


def _group_errors(
    group: LayerGroup,
    usual_counts: Collection[int],
    covariance_roots: Tensor | None,
    seed: int,
) -> GroupErrors:
    """Return the group's error as a function of the count, measured on some of its channels."""
    first = group.layer_plans[0]
    box = Box.of(group.layer_plans[0])
    kernels, sampled_roots = sample_channels(
        group.effective_kernels(), covariance_roots, first.groups
    )

    def error(count: int) -> float:
        weights, positions = fit_elements(
            kernels, box, kernel_count=count, covariance_roots=sampled_roots, seed=seed
        )
        errors = relative_errors(kernels, weights, positions, box, covariance_roots=sampled_roots)
        return sum(errors)

    return GroupErrors(
        cost=_cost(group),
        max_count=max(first.old_cells, *usual_counts),
        always_measured=usual_counts,
        error=error,
    )


def sample_channels(
    kernels: Sequence[Tensor], covariance_roots: Tensor | None, groups: int
) -> tuple[list[Tensor], Tensor | None]:
    """Return the kernels (O, I, *K) of every n-th channel, and the roots of their input channels.

    About `CountSettings.max_channel_pairs` pairs of channels are kept. Output channels are thinned
    out first, then input channels, then groups, so that as many groups as possible stay.

    Args:
        kernels: (O, I, *K) of each layer.
        covariance_roots: (groups * I, S, S), one for each input channel.
        groups: The convolution's groups.
    """
    grouped = [torch.unflatten(kernel, 0, (groups, -1)) for kernel in kernels]
    group_axis, output_axis, input_axis = range(3)  # of each grouped kernel
    sizes = grouped[0].shape[:3]
    pairs = math.prod(sizes)
    steps = [1, 1, 1]
    for axis in (output_axis, input_axis, group_axis):
        steps[axis] = max(1, min(sizes[axis], pairs // COUNT_SETTINGS.max_channel_pairs))
        pairs //= steps[axis]
    every_group = slice(None, None, steps[group_axis])
    every_output = slice(None, None, steps[output_axis])
    every_input = slice(None, None, steps[input_axis])
    sampled = []
    for kernel in grouped:
        sampled.append(kernel[every_group, every_output, every_input].flatten(0, 1))
    if covariance_roots is None:
        return sampled, None
    grouped_roots = torch.unflatten(covariance_roots, 0, (groups, -1))
    return sampled, grouped_roots[every_group, every_input].flatten(0, 1)
