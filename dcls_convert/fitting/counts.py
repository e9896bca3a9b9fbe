"""Scope "error": a kernel count for each tie group, so that the layers' errors have the least sum.

Kernel lines are those of `layers/elements.py`.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..geometry import ceil_div
from ..networks.running import full_precision
from ..networks.sites import ModelConvs
from ..options import AUTO, ERROR_SCOPE, PlanOptions
from ..planning.known_counts import LayerCounts
from ..planning.plan import ConversionPlan
from ..planning.planner import make_plan
from ..planning.rule_files import parse_rules
from ..progress import Notify
from .calibrate import CalibrationStatistics, measure_inputs
from .fit_settings import CountSettings
from .groups import LayerGroup, make_layers
from .images import Calibration
from .warm_start import fit_elements, relative_errors

SETTINGS = CountSettings()


@full_precision()
def counts_by_error(
    model: nn.Module,
    convs: ModelConvs,
    options: PlanOptions,
    *,
    seed: int,
    calibration: Calibration | None,
    notify: Notify,
) -> tuple[LayerCounts, CalibrationStatistics | None]:
    """Kernel counts with the least sum of the layers' relative errors, within the model's budget.

    With images, the errors are those of outputs, else those of kernels. Counts that rules state are
    kept. Returns the counts and the statistics of the images, None without images.

    Raises:
        PlanError: The model has no values, or one element in each kernel is over the budget.
    """
    plans = _plans_of_other_scopes(convs, options)
    model_plan = plans[0]
    groups = make_layers(model, model_plan)
    _check_values(groups)
    statistics = None
    if calibration is not None:
        statistics = measure_inputs(model, groups, calibration, notify)
    stated_rules = _rules_with_counts(model_plan)
    limit = sum(unit.limit for unit in model_plan.budget)
    free_groups: list[LayerGroup] = []
    for group in groups:
        if group.plans[0].rule in stated_rules:
            limit -= _cost(group) * group.plans[0].kernel_count
        else:
            free_groups.append(group)
    group_errors: list[GroupErrors] = []
    for number, group in enumerate(free_groups):
        progress = f"{number + 1} of {len(free_groups)}"
        notify(f"measuring errors of {group.title}, {progress}", number, len(free_groups))
        covariance_roots = None
        if statistics is not None:
            covariance_roots = statistics.covariance_roots(group)
        planned_counts = _planned_counts(group, plans)
        group_errors.append(_group_errors(group, planned_counts, covariance_roots, seed))
    counts = {layer.name: layer.kernel_count for layer in model_plan.layers}
    if free_groups:
        chosen = counts_of_min_error(group_errors, limit)
        for group, count in zip(free_groups, chosen, strict=True):
            for layer in group.plans:
                counts[layer.name] = count
    return LayerCounts(source=f"scope {ERROR_SCOPE}", counts=counts, solved=True), statistics


def _plans_of_other_scopes(convs: ModelConvs, options: PlanOptions) -> list[ConversionPlan]:
    """The plans of the scopes "model", "stage" and "layer"; the first one is always there."""
    # If one count for the whole model does not fit the budget, nothing does: let its PlanError
    # through.
    plans = [make_plan(convs, replace(options, scope="model"))]
    for scope in ("stage", "layer"):
        with contextlib.suppress(PlanError):  # a unit too small for one element: no candidate
            plans.append(make_plan(convs, replace(options, scope=scope)))
    return plans


def _check_values(groups: Sequence[LayerGroup]) -> None:
    for group in groups:
        for conv in group.convs:
            if conv.weight.is_meta:
                raise PlanError(
                    f"scope {ERROR_SCOPE!r} measures what the kernels lose, "
                    "and the model is on the meta device"
                )


def _rules_with_counts(plan: ConversionPlan) -> set[str]:
    """Labels of the rules that state a kernel count."""
    rules = parse_rules(plan.rules_text)
    labels = set()
    for index, rule in enumerate(rules.rules):
        if rule.kernel_count not in (None, AUTO):
            labels.add(rules.label(index))
    return labels


def _planned_counts(group: LayerGroup, plans: Sequence[ConversionPlan]) -> set[int]:
    """The counts that the plans give to the group."""
    name = group.plans[0].name
    counts = set()
    for plan in plans:
        for layer in plan.layers:
            if layer.name == name:
                counts.add(layer.kernel_count)
    return counts


def _cost(group: LayerGroup) -> int:
    """Parameters of one more element in each kernel, in all layers."""
    first = group.plans[0]
    return first.lines * (len(group.plans) + first.coordinates)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupErrors:
    """The error of one tie group for each kernel count, and what a count costs."""

    cost: int  # parameters of one more element in each kernel, in all layers
    most: int  # the largest count that the group can use
    always_measured: Collection[int]  # the result is no worse than with any of these counts
    error: Callable[[int], float]  # measures the error for a count


def _group_errors(
    group: LayerGroup,
    planned_counts: Collection[int],
    covariance_roots: Tensor | None,
    seed: int,
) -> GroupErrors:
    first = group.plans[0]
    box = group.box
    kernels, sampled_roots = sample_lines(group.effective_kernels(), covariance_roots, first.groups)

    def error(count: int) -> float:
        weights, positions = fit_elements(
            kernels, box, kernel_count=count, covariance_roots=sampled_roots, seed=seed
        )
        errors = relative_errors(kernels, weights, positions, box, covariance_roots=sampled_roots)
        return sum(errors)

    return GroupErrors(
        cost=_cost(group),
        most=max(first.old_cells, *planned_counts),
        always_measured=planned_counts,
        error=error,
    )


def sample_lines(
    kernels: Sequence[Tensor], covariance_roots: Tensor | None, groups: int
) -> tuple[list[Tensor], Tensor | None]:
    """Kernels (O, I, *K) of every n-th channel, and the roots of their input channels.

    About `CountSettings.max_lines` channel pairs are kept. Output channels are thinned out first,
    then inputs, then groups, so that as many groups as possible stay.

    Args:
        kernels: (O, I, *K) of each layer.
        covariance_roots: (groups * I, S, S), one for each input channel.
        groups: Of the convolution.
    """
    grouped = [torch.unflatten(kernel, 0, (groups, -1)) for kernel in kernels]
    group_axis, output_axis, input_axis = range(3)  # of each grouped kernel
    sizes = grouped[0].shape[:3]
    lines = math.prod(sizes)
    steps = [1, 1, 1]
    for axis in (output_axis, input_axis, group_axis):
        steps[axis] = max(1, min(sizes[axis], lines // SETTINGS.max_lines))
        lines //= steps[axis]
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


def counts_of_min_error(groups: Sequence[GroupErrors], limit: int) -> list[int]:
    """A count of at least 1 for each group, with the least sum of errors within `limit` parameters.

    Errors are measured at a few counts and interpolated between them. The chosen counts are then
    measured too, and the choice is repeated until all chosen counts are measured. The result is
    therefore no worse than any choice among the counts of `always_measured`.
    """
    costs = [group.cost for group in groups]
    measured: list[dict[int, float]] = []
    for group in groups:
        counts = _first_counts(group.most) | set(group.always_measured)
        measured.append({count: group.error(count) for count in counts})
    while True:
        interpolated = [_interpolate(errors) for errors in measured]
        chosen = allocate(costs, interpolated, limit)
        all_measured = True
        for errors, group, count in zip(measured, groups, chosen, strict=True):
            if count not in errors:
                errors[count] = group.error(count)
                all_measured = False
        if all_measured:
            return chosen


def _first_counts(most: int) -> set[int]:
    """Evenly spaced counts from 1 to the largest; all of them if they are few."""
    if most <= SETTINGS.measure_all:
        return set(range(1, most + 1))
    counts = set()
    for step in range(SETTINGS.first_counts):
        counts.add(1 + round((most - 1) * step / (SETTINGS.first_counts - 1)))
    return counts


def _interpolate(measured: Mapping[int, float]) -> dict[int, float]:
    """The error for every count, linear between the measured ones."""
    errors = dict(measured)
    for low, high in itertools.pairwise(sorted(measured)):
        for count in range(low + 1, high):
            fraction = (count - low) / (high - low)
            errors[count] = (1 - fraction) * measured[low] + fraction * measured[high]
    return errors


def allocate(costs: Sequence[int], errors: Sequence[Mapping[int, float]], limit: int) -> list[int]:
    """For each group, the count among `errors` with the least sum of errors, within a limit.

    Exact for any errors, by dynamic programming over the parameters spent: a multiple-choice
    knapsack. Of equal sums, the one with fewer parameters. If the limit has more units than
    `CountSettings.max_units`, each group's costs are rounded up to coarser units: the result then
    stays within the limit, but a better one may exist.

    Args:
        costs: Parameters of one more element, for each group.
        errors: The error by count, for each group.
        limit: Parameters of all groups together.
    """
    unit = max(math.gcd(*costs), ceil_div(limit, SETTINGS.max_units))
    units = limit // unit
    # Least sum of errors of the groups so far, by the units that they may spend.
    min_sum = torch.zeros(units + 1, dtype=torch.float64)
    picks_of_groups = []
    for cost, error_of_count in zip(costs, errors, strict=True):
        min_sum, picks = _add_group(min_sum, cost, error_of_count, unit)
        picks_of_groups.append(picks)
    assert min_sum[-1].isfinite(), "the planner has refused what admits no element for each group"
    # From the last group back to the first, along the picks that led to the least sum.
    units_left = int((min_sum == min_sum[-1]).nonzero()[0])
    chosen = []
    for index in reversed(range(len(costs))):
        picks = picks_of_groups[index]
        count = sorted(errors[index])[int(picks[units_left])]
        chosen.append(count)
        units_left -= ceil_div(costs[index] * count, unit)
    chosen.reverse()
    return chosen


def _add_group(
    min_sum: Tensor, cost: int, error_of_count: Mapping[int, float], unit: int
) -> tuple[Tensor, Tensor]:
    """The least sums with one more group, and which of its sorted counts each sum takes."""
    with_group = torch.full_like(min_sum, torch.inf)
    picks = torch.zeros(len(min_sum), dtype=torch.int16)
    for index, count in enumerate(sorted(error_of_count)):
        spent = ceil_div(cost * count, unit)
        if spent >= len(min_sum):
            break
        sums = min_sum[: len(min_sum) - spent] + error_of_count[count]
        better = sums < with_group[spent:]
        with_group[spent:] = torch.where(better, sums, with_group[spent:])
        picks[spent:][better] = index
    return with_group, picks
