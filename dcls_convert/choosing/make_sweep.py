"""Make a sweep: plan, fit and time each combination. One that fails is a row with the reason."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.conversion import convert_network_
from ..conversion.loaded import LoadedNetwork
from ..conversion.resolved import resolve
from ..errors import DclsConvertError, NothingMatchesError, PlanError, RuleError
from ..networks.copying import copy_network
from ..options import AUTO, DEFAULT_BUDGET
from ..planning.windows import candidate_windows
from ..records import shared_fields
from ..reports.predict import predict_report
from ..text import count_text, shortened
from .candidate import Candidate
from .recommendation import recommend
from .results import (
    Combination,
    Recommendation,
    RequestedSize,
    Sweep,
    SweepRow,
    TimingSettings,
    mark_dominated,
)
from .timing_rounds import MIN_ROUNDS, time_in_rounds_


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
    timing: tuple[TimingSettings, torch.device] | None = None,
    max_added_percent: float,
) -> Sweep:
    """Plan, fit and time every combination. A KeyboardInterrupt ends this with the results so far.

    Args:
        loaded: The network, with the options that are the same for all combinations.
        requested: The combinations.
        command: Returns the command line, or the Python call, that converts with a combination.
        timing: How to time, and on which device; None to time nothing.
        max_added_percent: Percent that the recommended size may add to the cost.

    Raises:
        CheckpointError: The weights already have elements.
        PlanError: The MACs cannot be counted although an input size was given, or there is no input
            size to time with.
        NothingMatchesError, RuleError: No combination can be planned.
    """
    request = loaded.request
    convs = loaded.convs
    name = type(request.model).__name__
    if loaded.source is not None:
        name = loaded.source.name
    _check_network(loaded, name, timed=timing is not None)
    original = SweepRow(
        asked=None,
        status="original",
        params=convs.params,
        macs=convs.macs,
        folded_bytes=_state_bytes(loaded.structure),
    )
    candidates = [Candidate(original)]
    interrupted = False
    try:
        _plan_all_(loaded, requested, command, candidates)
        planned = [candidate for candidate in candidates if candidate.row.status == "done"]
        if request.trained:
            _fit_all_(loaded, planned)
        if timing is not None and planned:
            settings, device = timing
            time_in_rounds_(loaded, candidates, settings, device)
    except KeyboardInterrupt:
        interrupted = True
    rows = mark_dominated([candidate.row for candidate in candidates])
    choice = recommend(rows, max_added_percent)
    if interrupted:
        complete = _complete_rows(rows, fitted=request.trained, timed=timing is not None)
        rows_requested = count_text(len(requested), "row")
        choice = Recommendation(why=f"only {complete} of {rows_requested} were finished")
    return Sweep(
        model=name,
        input_size=convs.input_size,
        macs_note=convs.macs_note,
        rows=rows,
        timing=timing[0] if timing else None,
        slower=max_added_percent,
        interrupted=interrupted,
        choice=choice,
    )


def _check_network(loaded: LoadedNetwork, name: str, *, timed: bool) -> None:
    """Raise CheckpointError or PlanError if the network cannot be swept."""
    request = loaded.request
    convs = loaded.convs
    loaded.refuse_authors_weights()
    needs_input_size = timed and convs.input_size is None
    if convs.macs is None and (request.input_size is not None or needs_input_size):
        raise PlanError(f"{shortened(name)}: {convs.macs_note}")


def _complete_rows(rows: Sequence[SweepRow], *, fitted: bool, timed: bool) -> int:
    """Count the rows that have all results or a reason why not, without the original."""
    complete = 0
    for row in rows[1:]:
        # A row is "done" once it is planned, unless a later step fails.
        has_reason = row.status != "done"
        lacks_error = fitted and row.kernel_error is None
        lacks_times = timed and (row.step_ms is None or row.step_ms.runs < MIN_ROUNDS)
        if has_reason or not (lacks_error or lacks_times):
            complete += 1
    return complete


def _plan_all_(
    loaded: LoadedNetwork,
    requested: Sequence[Combination],
    command: Callable[[Combination], str],
    candidates: list[Candidate],
) -> None:
    """Append a candidate for each combination, as soon as it is planned."""
    for number, combination in enumerate(requested, 1):
        loaded.notify(f"planning {number} of {len(requested)}")
        row = SweepRow(asked=combination, status="done", command=command(combination))
        candidate = Candidate(row)
        try:
            _plan_(loaded, candidate, combination)
        except (NothingMatchesError, RuleError):  # no combination can be planned
            raise
        except DclsConvertError as error:
            candidate.change(status="does not fit", reason=str(error))
        except Exception as error:
            candidate.fail("planning", error)
        candidates.append(candidate)


def _plan_(loaded: LoadedNetwork, candidate: Candidate, combination: Combination) -> None:
    """Plan a combination, and record in its row what the conversion would change."""
    options = replace(
        loaded.request.options,
        dilated_size=combination.size,
        kernel_count=combination.kernel_count or AUTO,
        budget=combination.budget or DEFAULT_BUDGET,
    )
    resolved = resolve(loaded, options)
    plan = resolved.plan
    report = predict_report(plan)
    dilated_sizes = set()
    kernel_counts = set()
    folded_bytes = _state_bytes(loaded.structure)
    for layer in plan.layers:
        dilated_sizes.add(layer.dilated_size)
        kernel_counts.add(layer.kernel_count)
        module: Any = loaded.structure.get_submodule(layer.name)
        added_weights = layer.folded_weights - layer.dense_weights
        folded_bytes += added_weights * module.weight.itemsize
    candidate.resolved = resolved
    candidate.change(
        layers=len(plan.layers),
        layers_beyond_map=report.layers_beyond_map,
        dilated_sizes=tuple(sorted(dilated_sizes)),
        kernel_counts=tuple(sorted(kernel_counts)),
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
        folded_bytes=folded_bytes,
    )


def _fit_all_(loaded: LoadedNetwork, planned: Sequence[Candidate]) -> None:
    for number, candidate in enumerate(planned, 1):
        loaded.notify(f"fitting {candidate.row.window}, {number} of {len(planned)}")
        with candidate.recording_failure("fitting"):
            _fit_(loaded, candidate)


def _fit_(loaded: LoadedNetwork, candidate: Candidate) -> None:
    """Convert a copy of the trained network, and record the errors of the conversion in the row."""
    assert candidate.resolved is not None
    network_copy = copy_network(loaded.network)
    conversion = convert_network_(loaded, candidate.resolved, model=network_copy)
    outcome = conversion.report.outcome
    if outcome is None:
        return
    row_fields = shared_fields(outcome, SweepRow)
    if not outcome.images:
        row_fields["output_error"] = conversion.random_output_error  # for random images
    candidate.change(**row_fields)


def _state_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's state dict; a shared tensor counts once."""
    tensors: dict[int, Tensor] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        tensors[id(tensor)] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
