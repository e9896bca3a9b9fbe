"""Scope "error": kernel counts by what the kernels of each tie group lose."""

from dataclasses import replace

from torch import Tensor, nn

from ..errors import PlanError
from ..networks.running import reproducible
from ..networks.sites import ModelConvs
from ..options import ERROR, SCOPES, PlanOptions
from ..planning.plan import LayerCounts
from ..planning.planner import make_plan
from ..progress import Notify, silent
from .allocation import Share, least_error
from .calibrate import seen_by_layers
from .groups import LayerGroup, make_layers
from .images import Calibration
from .warm_start import fit_elements, relative_errors


@reproducible()
def counts_by_error(
    model: nn.Module,
    convs: ModelConvs,
    options: PlanOptions,
    *,
    seed: int,
    calibration: Calibration | None = None,
    notify: Notify = silent,
) -> LayerCounts:
    """The counts by which the layers' relative errors have the least sum, within the budget of the whole model.

    Args:
        model, convs: With trained kernels, and its convolutions.
        options: What is asked for; its scope is not looked at.
        seed: Of the fits, as in `apply_plan_`.
        calibration: Images; errors of outputs then count instead of those of kernels.
        notify: Told about progress.

    Raises:
        PlanError: The model has no values, or the budget admits no element for each group.
    """
    plans = [make_plan(convs, replace(options, scope=scope)) for scope in SCOPES if scope != ERROR]
    groups = make_layers(model, plans[0])
    if any(conv.weight.is_meta for group in groups for conv in group.convs):
        raise PlanError(f"scope {ERROR!r} measures what the kernels lose, and the model is on the meta device")
    none: list[Tensor | None] = [None] * len(groups)
    seen = none if calibration is None else seen_by_layers(model, groups, calibration, notify=notify)
    count_of = [{layer.name: layer.kernel_count for layer in plan.layers} for plan in plans]
    shares = []
    for number, (group, roots) in enumerate(zip(groups, seen, strict=True)):
        what = f"measuring errors of {group.title}, {number + 1} of {len(groups)}"
        notify(what, number, len(groups))
        shares.append(_share(group, {counts[group.plans[0].name] for counts in count_of}, roots, seed))
    limit = sum(unit.limit for unit in plans[0].budget)
    chosen = least_error(shares, limit)
    counts = {layer.name: count for group, count in zip(groups, chosen, strict=True) for layer in group.plans}
    return LayerCounts(source=f"scope {ERROR}", counts=counts)


def _share(group: LayerGroup, tried: set[int], roots: Tensor | None, seed: int) -> Share:
    first = group.plans[0]
    kernels, fitting = group.effective_kernels(), group.fit_options()

    def error(count: int) -> float:
        elements = fit_elements(kernels, kernel_count=count, roots=roots, seed=seed, **fitting)
        return sum(relative_errors(kernels, *elements, roots=roots, **fitting))

    return Share(
        cost=first.lines * (len(group.plans) + first.coordinates),
        most=max(first.dense_weights // first.lines, *tried),
        tried=tried,
        error=error,
    )
