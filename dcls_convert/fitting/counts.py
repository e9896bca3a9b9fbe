"""Scope "error": how many elements each tie group gets, so that the summed error of all layers is
the least."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..networks.running import reproducible
from ..networks.sites import ModelConvs
from ..options import AUTO, ERROR, PlanOptions
from ..planning.plan import LayerCounts
from ..planning.planner import make_plan
from ..planning.rules import parse_rules
from ..progress import Notify
from .calibrate import CalibrationStatistics, measure_inputs
from .groups import LayerGroup, make_layers
from .images import Calibration
from .warm_start import fit_elements, relative_errors

MOST_UNITS = 1 << 21  # of parameters; a larger budget is counted in coarser ones
FIRST_LOOKS = 6  # counts at which the error of a group is measured first
ALL_LOOKED_AT = 9  # up to so many counts, all are measured
MOST_LINES = 128  # of a group, by which its errors are measured


@reproducible()
def counts_by_error(
    model: nn.Module,
    convs: ModelConvs,
    options: PlanOptions,
    *,
    seed: int,
    calibration: Calibration | None,
    notify: Notify,
) -> tuple[LayerCounts, CalibrationStatistics | None]:
    """The counts by which the layers' relative errors have the least sum, within the budget of the
    whole model.

    With images, errors of outputs count instead of those of kernels; what the model has seen in
    them comes with the counts. Counts that rules state stay. PlanError: the model has no values.
    """
    plans = [
        make_plan(convs, replace(options, scope="model"))
    ]  # whatever it refuses, has no counts
    for scope in ("stage", "layer"):
        with contextlib.suppress(PlanError):  # a unit too small for one element: no candidate
            plans.append(make_plan(convs, replace(options, scope=scope)))
    groups = make_layers(model, plans[0])
    if any(conv.weight.is_meta for group in groups for conv in group.convs):
        raise PlanError(
            f"scope {ERROR!r} measures what the kernels lose, and the model is on the meta device"
        )
    seen = None if calibration is None else measure_inputs(model, groups, calibration, notify)
    count_of = [{layer.name: layer.kernel_count for layer in plan.layers} for plan in plans]
    limit, shares, counts = sum(unit.limit for unit in plans[0].budget), [], dict(count_of[0])
    rules = parse_rules(plans[0].rules_text)
    stated = {
        rules.label(index)
        for index, rule in enumerate(rules.rules)
        if rule.kernel_count not in (None, AUTO)
    }
    free = [group for group in groups if group.plans[0].rule not in stated]
    for number, group in enumerate(free):
        notify(f"measuring errors of {group.title}, {number + 1} of {len(free)}", number, len(free))
        roots = None if seen is None else seen.roots(group)
        shares.append(
            _share(group, {counts[group.plans[0].name] for counts in count_of}, roots, seed)
        )
    limit -= sum(
        _cost(group) * group.plans[0].kernel_count for group in groups if group not in free
    )
    for group, count in zip(free, least_error(shares, limit) if free else (), strict=True):
        counts |= {layer.name: count for layer in group.plans}
    return LayerCounts(source=f"scope {ERROR}", counts=counts, solved=True), seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One tie group that takes its share of the budget."""

    cost: int  # parameters of one more element, in all its layers
    most: int  # elements that it can use
    tried: Collection[int]  # counts that must be considered, as other rules would take them
    error: Callable[[int], float]  # measured for a count


def _share(group: LayerGroup, tried: set[int], roots: Tensor | None, seed: int) -> Share:
    first, box = group.plans[0], group.box
    kernels, roots = some_lines(group.effective_kernels(), roots, first.groups)

    def error(count: int) -> float:
        elements = fit_elements(kernels, box, kernel_count=count, roots=roots, seed=seed)
        return sum(relative_errors(kernels, *elements, box, roots=roots))

    most = first.dense_weights // first.lines
    return Share(cost=_cost(group), most=max(most, *tried), tried=tried, error=error)


def _cost(group: LayerGroup) -> int:
    """Parameters of one more element, in all layers."""
    return group.plans[0].lines * (len(group.plans) + group.plans[0].coordinates)


def some_lines(
    kernels: Sequence[Tensor], roots: Tensor | None, groups: int
) -> tuple[list[Tensor], Tensor | None]:
    """Kernels (O, I, *K) of every n-th channel, and the roots (groups * I, S, S) of these;
    MOST_LINES, or a few more.

    Outputs of a group are left out first, then inputs, then groups, so that as many of the latter
    as may be are seen.
    """
    grouped = [torch.unflatten(kernel, 0, (groups, -1)) for kernel in kernels]
    left, nth = math.prod(grouped[0].shape[:3]), [1, 1, 1]
    for axis in (1, 2, 0):
        nth[axis] = max(1, min(grouped[0].shape[axis], left // MOST_LINES))
        left //= nth[axis]
    every = [slice(None, None, step) for step in nth]
    some = [kernel[every[0], every[1], every[2]].flatten(0, 1) for kernel in grouped]
    return some, None if roots is None else torch.unflatten(roots, 0, (groups, -1))[
        every[0], every[2]
    ].flatten(0, 1)


def least_error(shares: Sequence[Share], limit: int) -> list[int]:
    """A count of at least 1 for each group, for the least sum of errors within a limit of
    parameters.

    Between the counts at which errors are measured, they are taken for linear. What is chosen is
    measured, and the choice made again, until all that is chosen was measured. So the result is no
    worse than any choice among `tried`.
    """
    measured: list[dict[int, float]] = []
    for share in shares:
        looks = FIRST_LOOKS if share.most > ALL_LOOKED_AT else share.most
        first = {1 + round((share.most - 1) * step / max(looks - 1, 1)) for step in range(looks)}
        measured.append({count: share.error(count) for count in first | set(share.tried)})
    while True:
        chosen = allocate([share.cost for share in shares], [*map(_between, measured)], limit)
        new = [
            trio for trio in zip(measured, shares, chosen, strict=True) if trio[2] not in trio[0]
        ]
        if not new:
            return chosen
        for known, share, count in new:
            known[count] = share.error(count)


def _between(known: Mapping[int, float]) -> dict[int, float]:
    """The error for every count; linear between those that are known."""
    errors = dict(known)
    for low, high in itertools.pairwise(sorted(known)):
        for count in range(low + 1, high):
            part = (count - low) / (high - low)
            errors[count] = (1 - part) * known[low] + part * known[high]
    return errors


def allocate(costs: Sequence[int], errors: Sequence[Mapping[int, float]], limit: int) -> list[int]:
    """For each group the count of those in `errors` with the least sum of errors, within a limit of
    parameters.

    Exact for every form of the errors, by dynamic programming over the parameters spent. Of equal
    sums, the one with fewer parameters. Where the limit has more than 2 million units, each group's
    costs are rounded up to coarser ones: the result then keeps the limit, but a better one may
    exist.
    """
    unit = max(math.gcd(*costs), -(-limit // MOST_UNITS))
    units = limit // unit
    best = torch.zeros(
        units + 1, dtype=torch.float64
    )  # least sum of the groups so far, for at most so many units
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
    assert best[-1].isfinite(), "the planner has refused what admits no element for each group"
    left = int((best == best[-1]).nonzero()[0])
    chosen = []
    for cost, counts, pick in reversed(picks):
        chosen.append(counts[int(pick[left])])
        left -= -(-cost * chosen[-1] // unit)
    return chosen[::-1]
