"""Scope "error": choose a kernel count for each tie group, so that the sum of errors is least."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PlanError
from ..geometry import ceil_div
from ..options import ERROR_SCOPE
from ..placing.place import ConvGroup
from ..planning.kernel_counts import budget_limit, largest_count
from ..planning.plan import DraftPlan
from ..progress import Notify
from ..running.process_settings import full_precision
from .boxes import Box
from .calibration import CalibrationStatistics
from .fit import lines_of, roots_of_lines
from .positions import errors_by_count

# Approximate number of pairs of input and output channels on which a group's error is measured.
MAX_CHANNEL_PAIRS = 128
MAX_UNITS = 1 << 21  # most units in a budget; a larger budget is counted in coarser units


@full_precision()
def choose_counts_by_error(
    draft: DraftPlan,
    groups: Sequence[ConvGroup],
    statistics: CalibrationStatistics | None,
    notify: Notify,
) -> dict[str, int]:
    """Choose kernel counts with the least sum of relative layer errors, within the draft's budget.

    Args:
        draft: The layers, their windows, and the share that the budget allows.
        groups: The draft's convolutions, from `find_groups`.
        statistics: Statistics of images, to sum errors of outputs. None: sum errors of kernels.
        notify: Called with messages on progress.

    Returns:
        The counts of the layers for which no rule states one, by the names of the layers.

    Raises:
        PlanError: The model is on the meta device.
    """
    _refuse_meta_model(groups)
    limit = budget_limit(draft.layers, draft.share)
    free_groups: list[ConvGroup] = []  # groups whose counts no rule states
    for group in groups:
        if group.layer_plans[0].count_is_stated:
            limit -= _cost(group) * group.layer_plans[0].kernel_count
        else:
            free_groups.append(group)
    if not free_groups:
        return {}
    count_for_all = largest_count(draft.layers, draft.share)
    errors = []  # by count, for each group
    for number, group in enumerate(free_groups):
        progress = f"{number + 1} of {len(free_groups)}"
        notify(f"measuring errors of {group.title}, {progress}", number, len(free_groups))
        cost_roots = None
        if statistics is not None:
            cost_roots = statistics.cost_roots(group)
        errors.append(_relative_errors(group, cost_roots, at_least=count_for_all))
    counts: dict[str, int] = {}
    chosen = solve_knapsack([_cost(group) for group in free_groups], errors, limit)
    for group, count in zip(free_groups, chosen, strict=True):
        for layer in group.layer_plans:
            counts[layer.name] = count
    return counts


def _refuse_meta_model(groups: Sequence[ConvGroup]) -> None:
    for group in groups:
        for conv in group.convs:
            if conv.weight.is_meta:
                raise PlanError(
                    f"scope {ERROR_SCOPE!r} compares kernels, "
                    "which a model on the meta device does not have"
                )


def _cost(group: ConvGroup) -> int:
    """Return the parameters that one more element per kernel adds, over all layers."""
    first = group.layer_plans[0]
    return first.lines * (len(group.layer_plans) + first.coordinates_per_element)


def _relative_errors(group: ConvGroup, cost_roots: Tensor | None, *, at_least: int) -> list[float]:
    """Return the sum of the layers' relative errors with 0, 1, ... elements.

    Errors are measured on a sample of the channels: up to as many elements as the old kernel has
    cells, or up to `at_least` if that is more.
    """
    plan = group.layer_plans[0]
    box = Box.of(plan)
    kernels, sampled_roots = sample_channels(group.effective_kernels(), cost_roots, plan.groups)
    lines = lines_of(kernels, box)
    roots = roots_of_lines(sampled_roots, kernels[0], len(lines))
    max_count = max(plan.old_cells, at_least)
    errors = errors_by_count(lines, max_count, box, roots)  # (L, 1 + max_count), squared
    relative = (errors / errors[:, :1]).nan_to_num().sqrt().sum(0)  # a layer may be zero
    if box.interpolation.is_exact_on_cells:
        relative[plan.old_cells :] = 0
    return relative.tolist()


def sample_channels(
    kernels: Sequence[Tensor], cost_roots: Tensor | None, groups: int
) -> tuple[list[Tensor], Tensor | None]:
    """Return the kernels (O, I, *K) of every n-th channel, and the roots of their input channels.

    About `MAX_CHANNEL_PAIRS` pairs of channels are kept. Output channels are thinned
    out first, then input channels, then groups, so that as many groups as possible stay.

    Args:
        kernels: (O, I, *K) of each layer.
        cost_roots: (groups * I, S, S), one for each input channel.
        groups: The convolution's groups.
    """
    grouped = [torch.unflatten(kernel, 0, (groups, -1)) for kernel in kernels]
    group_axis, output_axis, input_axis = range(3)  # of each grouped kernel
    sizes = grouped[0].shape[:3]
    pairs = math.prod(sizes)
    steps = [1, 1, 1]
    for axis in (output_axis, input_axis, group_axis):
        steps[axis] = max(1, min(sizes[axis], pairs // MAX_CHANNEL_PAIRS))
        pairs //= steps[axis]
    every_group = slice(None, None, steps[group_axis])
    every_output = slice(None, None, steps[output_axis])
    every_input = slice(None, None, steps[input_axis])
    sampled = []
    for kernel in grouped:
        sampled.append(kernel[every_group, every_output, every_input].flatten(0, 1))
    if cost_roots is None:
        return sampled, None
    grouped_roots = torch.unflatten(cost_roots, 0, (groups, -1))
    return sampled, grouped_roots[every_group, every_input].flatten(0, 1)


def solve_knapsack(
    costs: Sequence[int], errors: Sequence[Sequence[float]], limit: int
) -> list[int]:
    """Choose one count for each group, so that the sum of errors is least within the limit.

    This is a multiple-choice knapsack problem. It is solved exactly, for any errors, by dynamic
    programming over the parameters spent, beyond one element of each group. Among choices with
    equal sums, the one with fewer parameters wins. If these parameters are more than `MAX_UNITS`
    units, each group's costs are rounded up to coarser units: the result stays within the limit,
    but a better one may exist.

    Args:
        costs: Parameters that one more element per kernel adds, for each group.
        errors: Errors of each group with 0, 1, ... elements; at least 1 is chosen.
        limit: Maximum number of parameters of all groups together. There is room for one element
            of each group.
    """
    left = limit - sum(costs)  # after one element of each group
    unit = max(math.gcd(*costs), ceil_div(left, MAX_UNITS))
    # min_sum[u] is the least sum of errors of the groups so far, if they spend at most u units.
    min_sum = torch.zeros(left // unit + 1, dtype=torch.float64)
    picks_of_groups = []
    for cost, error_of_count in zip(costs, errors, strict=True):
        min_sum, picks = _add_group(min_sum, cost, error_of_count, unit)
        picks_of_groups.append(picks)
    # Go back from the last group to the first, along the picks that led to the least sum.
    units_left = int((min_sum == min_sum[-1]).nonzero()[0])
    chosen = []
    for cost, picks in zip(reversed(costs), reversed(picks_of_groups), strict=True):
        count = int(picks[units_left])
        chosen.append(count)
        units_left -= ceil_div(cost * (count - 1), unit)
    chosen.reverse()
    return chosen


def _add_group(
    min_sum: Tensor, cost: int, error_of_count: Sequence[float], unit: int
) -> tuple[Tensor, Tensor]:
    """Add a group: return the new least sums, and the group's count in each of them."""
    with_group = torch.full_like(min_sum, torch.inf)
    picks = torch.zeros(len(min_sum), dtype=torch.int16)
    for count in range(1, len(error_of_count)):
        spent = ceil_div(cost * (count - 1), unit)
        if spent >= len(min_sum):
            break
        sums = min_sum[: len(min_sum) - spent] + error_of_count[count]
        better = sums < with_group[spent:]
        with_group[spent:] = torch.where(better, sums, with_group[spent:])
        picks[spent:][better] = count
    return with_group, picks
