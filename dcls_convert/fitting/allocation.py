"""How many elements each tie group gets, so that the summed error of all layers is the least for their parameters."""

import math
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

MOST_UNITS = 1 << 21  # of parameters; a larger budget is counted in coarser ones
FIRST_LOOKS = 6  # counts at which the error of a group is measured first
ALL_LOOKED_AT = 9  # up to so many counts, all are measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One tie group that takes its share of the budget."""

    cost: int  # parameters of one more element, in all its layers
    most: int  # elements that it can use
    tried: Collection[int]  # counts that must be considered, as other rules would take them
    error: Callable[[int], float]  # measured for a count


def least_error(shares: Sequence[Share], limit: int) -> list[int]:
    """A count of at least 1 for each group, for the least sum of errors within a limit of parameters.

    Between the counts at which errors are measured, they are taken for linear. What is chosen is measured, and the
    choice made again, until all that is chosen was measured. So the result is no worse than any choice among `tried`.
    """
    looks = [_first_looks(share) for share in shares]
    measured = [{count: share.error(count) for count in at} for share, at in zip(shares, looks, strict=True)]
    while True:
        curves = [_between(known, share.most) for known, share in zip(measured, shares, strict=True)]
        chosen = allocate([share.cost for share in shares], curves, limit)
        new = [(index, count) for index, count in enumerate(chosen) if count not in measured[index]]
        if not new:
            return chosen
        for index, count in new:
            measured[index][count] = shares[index].error(count)


def _first_looks(share: Share) -> set[int]:
    if share.most <= ALL_LOOKED_AT:
        return set(range(1, share.most + 1)) | set(share.tried)
    spread = {1 + round((share.most - 1) * step / (FIRST_LOOKS - 1)) for step in range(FIRST_LOOKS)}
    return spread | set(share.tried)


def _between(known: Mapping[int, float], most: int) -> dict[int, float]:
    """The error for every count; linear between those that are known."""
    counts = sorted(known)
    errors = dict(known)
    for count in range(counts[0], max(most, counts[-1]) + 1):
        if count not in errors:
            low, high = (counts[bisect(counts, count) + side] for side in (-1, 0))
            part = (count - low) / (high - low)
            errors[count] = (1 - part) * known[low] + part * known[high]
    return errors


def allocate(costs: Sequence[int], errors: Sequence[Mapping[int, float]], limit: int) -> list[int]:
    """For each group the count of those in `errors` with the least sum of errors, within a limit of parameters.

    Exact for every form of the errors, by dynamic programming over the parameters spent. Of equal sums, the one with
    fewer parameters. Where the limit has more than 2 million units, each group's costs are rounded up to coarser ones:
    the result then keeps the limit, but a better one may exist.

    Raises:
        ValueError: Not even the least counts keep within the limit.
    """
    unit = max(math.gcd(*costs), -(-limit // MOST_UNITS))
    units = limit // unit
    best = torch.zeros(units + 1, dtype=torch.float64)  # least sum of the groups so far, for at most so many units
    picks = []
    for cost, known in zip(costs, errors, strict=True):
        counts = sorted(known)
        least = torch.full_like(best, torch.inf)
        pick = torch.zeros(units + 1, dtype=torch.int16)
        for index, count in enumerate(counts):
            spent = -(-cost * count // unit)
            if spent > units:
                break
            sums = best[: units + 1 - spent] + known[count]
            better = sums < least[spent:]
            least[spent:] = torch.where(better, sums, least[spent:])
            pick[spent:][better] = index
        best = least
        picks.append((cost, counts, pick))
    if not math.isfinite(float(best[-1])):
        raise ValueError(f"a limit of {limit} parameters admits no element for each group")
    left = int((best == best[-1]).nonzero()[0])
    chosen = []
    for cost, counts, pick in reversed(picks):
        chosen.append(counts[int(pick[left])])
        left -= -(-cost * chosen[-1] // unit)
    return chosen[::-1]
