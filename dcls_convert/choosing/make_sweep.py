"""Make a sweep: plan each combination. One that does not fit is a row with the reason."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..conversion.loaded import LoadedNetwork
from ..conversion.resolved import resolve
from ..errors import DclsConvertError, NothingMatchesError, PlanError, RuleError
from ..options import AUTO, DEFAULT_BUDGET
from ..planning.windows import candidate_windows
from ..reports.predict import predict_report
from ..text import shortened
from .recommendation import recommend
from .results import Combination, RequestedSize, Sweep, SweepRow


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


def default_sizes(loaded: LoadedNetwork) -> Sequence[RequestedSize]:
    """Return the windows to try by default: sizes, or growths if kernels have several sizes."""
    options = replace(loaded.request.options, dilated_size=AUTO, kernel_count=AUTO)
    return candidate_windows(resolve(loaded, options).plan.layers)


def make_sweep(
    loaded: LoadedNetwork,
    requested: Sequence[Combination],
    command: Callable[[Combination], str],
    *,
    max_added_percent: float,
) -> Sweep:
    """Plan every combination, and recommend one.

    Args:
        loaded: The network, with the options that are the same for all combinations.
        requested: The combinations.
        command: Returns the command line, or the Python call, that converts with a combination.
        max_added_percent: Percent that the recommended size may add to the MACs.

    Raises:
        CheckpointError: The weights already have elements.
        PlanError: The MACs cannot be counted although an input size was given.
        NothingMatchesError, RuleError: No combination can be planned.
    """
    request = loaded.request
    convs = loaded.convs
    name = type(request.model).__name__
    if loaded.source is not None:
        name = loaded.source.name
    loaded.refuse_authors_weights()
    if convs.macs is None and request.input_size is not None:
        raise PlanError(f"{shortened(name)}: {convs.macs_note}")
    rows = [SweepRow(asked=None, status="original", params=convs.params, macs=convs.macs)]
    for number, combination in enumerate(requested, 1):
        loaded.notify(f"planning {number} of {len(requested)}")
        row = SweepRow(asked=combination, status="done", command=command(combination))
        try:
            row = _planned(loaded, row, combination)
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


def _planned(loaded: LoadedNetwork, row: SweepRow, combination: Combination) -> SweepRow:
    """Plan a combination, and return its row with what the conversion would change."""
    options = replace(
        loaded.request.options,
        dilated_size=combination.size,
        kernel_count=combination.kernel_count or AUTO,
        budget=combination.budget or DEFAULT_BUDGET,
    )
    plan = resolve(loaded, options).plan
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
