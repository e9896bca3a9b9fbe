"""Choose kernel counts for tie groups that share a budget, so that the sum of errors is least."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import ceil_div
from .fit_settings import CountSettings

COUNT_SETTINGS = CountSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupErrors:
    """The error of one tie group as a function of its kernel count, and the cost of an element."""

    cost: int  # parameters that one more element per kernel adds, over all layers of the group
    max_count: int  # largest count to consider
    always_measured: Collection[int]  # counts that are measured before the first choice
    error: Callable[[int], float]  # measures the error at a count


def counts_of_min_error(groups: Sequence[GroupErrors], limit: int) -> list[int]:
    """Return a count for each group, so that the sum of errors is least within the limit.

    Counts are at least 1, and all groups together cost at most `limit` parameters.

    Errors are measured at a few counts and interpolated between them. The chosen counts are then
    measured too, and the choice is repeated until all chosen counts are measured. The result is
    therefore no worse than any choice within the limit among the counts of `always_measured`.
    """
    costs = [group.cost for group in groups]
    measured: list[dict[int, float]] = []
    for group in groups:
        counts = _first_counts(group.max_count) | set(group.always_measured)
        measured.append({count: group.error(count) for count in counts})
    while True:
        interpolated = [_interpolate(errors) for errors in measured]
        chosen = solve_knapsack(costs, interpolated, limit)
        all_measured = True
        for errors, group, count in zip(measured, groups, chosen, strict=True):
            if count not in errors:
                errors[count] = group.error(count)
                all_measured = False
        if all_measured:
            return chosen


def _first_counts(max_count: int) -> set[int]:
    """Return evenly spaced counts from 1 to the largest, or all of them if there are few."""
    if max_count <= COUNT_SETTINGS.measure_all:
        return set(range(1, max_count + 1))
    counts = set()
    for step in range(COUNT_SETTINGS.first_counts):
        counts.add(1 + round((max_count - 1) * step / (COUNT_SETTINGS.first_counts - 1)))
    return counts


def _interpolate(measured: Mapping[int, float]) -> dict[int, float]:
    """Return the error for every count, interpolated linearly between the measured ones."""
    errors = dict(measured)
    for low, high in itertools.pairwise(sorted(measured)):
        for count in range(low + 1, high):
            fraction = (count - low) / (high - low)
            errors[count] = (1 - fraction) * measured[low] + fraction * measured[high]
    return errors


def solve_knapsack(
    costs: Sequence[int], errors: Sequence[Mapping[int, float]], limit: int
) -> list[int]:
    """Choose one count for each group, so that the sum of errors is least within the limit.

    This is a multiple-choice knapsack problem. It is solved exactly, for any errors, by dynamic
    programming over the parameters spent. Among choices with equal sums, the one with fewer
    parameters wins. If the limit has more units than `CountSettings.max_units`, each group's costs
    are rounded up to coarser units: the result stays within the limit, but a better one may exist.

    Args:
        costs: Parameters that one more element per kernel adds, for each group.
        errors: Error by count, for each group.
        limit: Maximum number of parameters of all groups together.
    """
    unit = max(math.gcd(*costs), ceil_div(limit, COUNT_SETTINGS.max_units))
    units = limit // unit
    # min_sum[u] is the least sum of errors of the groups so far, if they spend at most u units.
    min_sum = torch.zeros(units + 1, dtype=torch.float64)
    picks_of_groups = []
    for cost, error_of_count in zip(costs, errors, strict=True):
        min_sum, picks = _add_group(min_sum, cost, error_of_count, unit)
        picks_of_groups.append(picks)
    assert min_sum[-1].isfinite(), "the planner refuses a limit below one element for each group"
    # Go back from the last group to the first, along the picks that led to the least sum.
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
    """Add a group: return the new least sums, and the index of its sorted count in each of them."""
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
