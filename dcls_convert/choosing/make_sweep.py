"""Make a sweep: plan each combination. One that does not fit is a row with the reason."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..conversion.decide import plan_network
from ..conversion.load import LoadedNetwork, RequestWeights, load
from ..conversion.request import ConversionRequest
from ..errors import CheckpointError, DclsConvertError, NothingMatchesError, PlanError, RuleError
from ..networks.find_convs import NOT_CHECKED, OR_NO_SIZE
from ..options import AUTO, DEFAULT_BUDGET
from ..planning.windows import candidate_windows
from ..progress import Note, Notify, ignore_messages
from ..reports.predict import predict_report
from ..text import shortened
from .recommendation import recommend
from .rows import Combination, RequestedSize, SweepRow
from .sweep import Sweep


def combinations(
    sizes: Sequence[RequestedSize], counts: Sequence[int] | None, budgets: Sequence[float] | None
) -> list[Combination]:
    """Combine every size with every count, or with every budget."""
    requested = []
    for size in sizes:
        for count in counts or (None,):
            for budget in budgets or (None,):
                requested.append(Combination(size=size, kernel_count=count, budget=budget))
    return requested


def _default_sizes(loaded: LoadedNetwork, weights: RequestWeights | None) -> list[RequestedSize]:
    """Return the windows to try by default: sizes, or growths if kernels have several sizes."""
    options = replace(loaded.request.options, dilated_size=AUTO, kernel_count=AUTO)
    return list(candidate_windows(plan_network(loaded, weights, options).layers))


def make_sweep(
    request: ConversionRequest,
    sizes: Sequence[RequestedSize] | None,
    counts: Sequence[int] | None,
    budgets: Sequence[float] | None,
    command: Callable[[Combination], str],
    *,
    max_added_percent: float,
    notify: Notify = ignore_messages,
    note: Note = ignore_messages,
) -> Sweep:
    """Plan every size with every count, or with every budget, and recommend one.

    Args:
        request: The network, with the options that are the same for all combinations.
        sizes: Windows; None for those to try by default.
        counts: Elements per kernel; None for as many as the budget allows.
        budgets: Percentages of the replaced weights, instead of counts.
        command: Returns the command line, or the Python call, that converts with a combination.
        max_added_percent: Percent that the recommended size may add to the MACs.
        notify: Called with what is being done.
        note: Called with what the user should know.

    Raises:
        CheckpointError: The weights already have elements.
        PlanError: The MACs cannot be counted although an input size was given.
        NothingMatchesError, RuleError: No combination can be planned.
    """
    loaded, weights = load(request, notify=notify, note=note)
    convs = loaded.convs
    name = type(request.model).__name__
    if loaded.source is not None:
        name = loaded.source.name
    if weights is not None and weights.authors is not None:
        raise CheckpointError(
            f"{weights.where}: has elements of its own, so there is nothing to compare"
        )
    if convs.macs is None and request.states_inputs:
        reason = (convs.macs_note or "").removesuffix(NOT_CHECKED)
        raise PlanError(f"{shortened(name)}: {reason}{OR_NO_SIZE}")
    requested = combinations(sizes or _default_sizes(loaded, weights), counts, budgets)
    rows = [SweepRow(asked=None, status="original", params=convs.params, macs=convs.macs)]
    for number, combination in enumerate(requested, 1):
        notify(f"planning {number} of {len(requested)}")
        row = SweepRow(asked=combination, status="done", command=command(combination))
        try:
            row = _planned(loaded, weights, row, combination)
        except (NothingMatchesError, RuleError):  # no combination can be planned
            raise
        except DclsConvertError as error:
            row = replace(row, status="does not fit", reason=str(error))
        rows.append(row)
    trained = request.start != "random"
    return Sweep(
        model=name,
        trained=trained,
        input_size=convs.input_size,
        macs_note=convs.macs_note,
        rows=tuple(rows),
        added_macs=max_added_percent,
        choice=recommend(rows, max_added_percent, trained=trained),
    )


def _planned(
    loaded: LoadedNetwork, weights: RequestWeights | None, row: SweepRow, combination: Combination
) -> SweepRow:
    """Plan a combination, and return its row with what the conversion would change."""
    options = replace(
        loaded.request.options,
        dilated_size=combination.size,
        kernel_count=combination.kernel_count or AUTO,
        budget=combination.budget or DEFAULT_BUDGET,
    )
    plan = plan_network(loaded, weights, options)
    report = predict_report(plan)
    dilated_sizes = {layer.dilated_size for layer in plan.layers}
    kernel_counts = {layer.kernel_count for layer in plan.layers}
    return replace(
        row,
        layers=len(plan.layers),
        layers_beyond_map=report.layers_beyond_map,
        dilated_sizes=tuple(sorted(dilated_sizes)),
        kernel_counts=tuple(sorted(kernel_counts)),
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
    )
