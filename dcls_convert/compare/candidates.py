"""Plan, fit and time each combination of a sweep. What goes wrong in one is its row."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, NothingMatchesError, PlanError, RuleError, one_line, shown
from ..fitting.images import calibrate
from ..options import AUTO, DEFAULT_BUDGET
from ..pipeline import Job
from ..planning.plan import ConversionPlan, taken_from
from ..reports.report import predict_report
from .sweep import Asked, Size, Sweep, SweepRow, TimingSettings, choose, with_dominated
from .timing import Timed, time_


@dataclass(slots=True)
class Candidate:
    """A combination, what is known of it, and its plan; None where it does not fit."""

    row: SweepRow
    plan: ConversionPlan | None = None

    def fail(self, error: BaseException, doing: str) -> None:
        """Keep what is known, with the reason why there is no more."""
        kind = "" if isinstance(error, DclsConvertError) else f"{type(error).__name__}: "
        self.row = replace(self.row, status="failed", reason=f"{doing}: {kind}{one_line(error)[:200]}")
        self.plan = None


def combinations(
    sizes: Sequence[Size], counts: Sequence[int] | None = None, budgets: Sequence[float] | None = None
) -> list[Asked]:
    """Every size with every count, or with every budget."""
    if counts:
        return [Asked(size=size, kernel_count=count) for size, count in itertools.product(sizes, counts)]
    return [Asked(size=size, budget=budget) for size, budget in itertools.product(sizes, budgets or (None,))]


def make_sweep(
    job: Job,
    asked: Sequence[Asked],
    command: Callable[[Asked], str],
    *,
    timing: tuple[TimingSettings, torch.device] | None = None,
    slower: float,
) -> Sweep:
    """All rows, the dense original first. KeyboardInterrupt ends it early, with what is known by then.

    `command` gives the command line that converts as a combination; `slower`, for `choose`, is in percent.
    DclsConvertError where no combination can be planned, or the network cannot be built.
    """
    convs, source = job.convs, job.source
    assert source is not None
    if job.elements is not None:
        raise CheckpointError(f"{job.where}: has elements of its own, so there is nothing to compare")
    if convs.macs is None and (job.input_size is not None or (timing and convs.input_size is None)):
        raise PlanError(f"{shown(source.name)}: {convs.macs_note}")
    original = SweepRow(
        asked=None, status="original", params=convs.params, macs=convs.macs, folded_bytes=_state_bytes(job.meta)
    )
    candidates = [Candidate(original)]
    interrupted = False
    try:
        for number, one in enumerate(asked, 1):
            job.notify(f"planning {number} of {len(asked)}")
            candidates.append(_planned(job, one, command(one)))
        planned = [candidate for candidate in candidates if candidate.plan]
        for number, candidate in enumerate(planned if job.trained else [], 1):
            job.notify(f"fitting {candidate.row.window}, {number} of {len(planned)}")
            _fit(job, candidate)
        if timing is not None and planned:
            _time(job, candidates, *timing)
    except KeyboardInterrupt:
        interrupted = True
    rows = with_dominated([candidate.row for candidate in candidates])
    return Sweep(
        model=source.name,
        input_size=convs.input_size,
        macs_note=convs.macs_note,
        rows=rows,
        timing=timing[0] if timing else None,
        slower=slower,
        interrupted=interrupted,
        choice=choose(rows, slower),
    )


def _planned(job: Job, asked: Asked, command: str) -> Candidate:
    """One combination; one that does not fit has the reason in its row."""
    count = AUTO if asked.kernel_count is None else asked.kernel_count
    budget = DEFAULT_BUDGET if asked.budget is None else asked.budget
    candidate = Candidate(SweepRow(asked=asked, status="done", command=command))
    try:
        plan = job.plan(replace(job.options, dilated_size=asked.size, kernel_count=count, budget=budget))
    except (NothingMatchesError, RuleError):  # no combination can be planned
        raise
    except DclsConvertError as error:
        candidate.row = replace(candidate.row, status="does not fit", reason=str(error))
        return candidate
    except Exception as error:
        candidate.fail(error, "planning")
        return candidate
    report = predict_report(plan)
    grown = sum(
        (layer.folded_weights - layer.dense_weights) * cast(Any, job.meta.get_submodule(layer.name)).weight.itemsize
        for layer in plan.layers
    )
    row = replace(
        candidate.row,
        layers=len(plan.layers),
        dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
        kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
        folded_bytes=_state_bytes(job.meta) + grown,
    )
    return Candidate(row, plan)


def _fit(job: Job, candidate: Candidate) -> None:
    """Convert a copy of the trained network, and state in the row what that keeps."""
    assert candidate.plan is not None
    network = job.network
    if job.calibration is not None:  # read once, for all candidates
        job.calibration = calibrate(network, candidate.plan, job.calibration, note=job.note)
    try:
        done = job.convert(candidate.plan, model=copy.deepcopy(network))
    except Exception as error:
        candidate.fail(error, "fitting")
        return
    outcome = done.report.outcome
    if outcome is not None:
        kept = taken_from(outcome, SweepRow)
        candidate.row = replace(candidate.row, **kept | ({} if outcome.images else {"output_error": done.moved}))


def _time(job: Job, candidates: Sequence[Candidate], settings: TimingSettings, device: torch.device) -> None:
    """Measure those that have a plan, and the original, and put the times into their rows."""
    size = job.convs.input_size
    assert size is not None
    network = job.network.to(device)
    timed: list[tuple[Candidate, Timed]] = []
    for candidate in candidates:
        if candidate.plan is None and candidate.row.asked is not None:
            continue
        job.notify(f"building {candidate.row.window}")
        try:
            timed.append((candidate, Timed.of(network, candidate.plan)))
        except Exception as error:
            candidate.fail(error, "building")
    try:
        time_([one for _, one in timed], size, settings, device, notify=job.notify)
    finally:
        for candidate, one in timed:
            candidate.row = replace(candidate.row, ways=dict(one.ways))
            if one.error is not None:
                candidate.fail(one.error, "timing")
            else:
                candidate.row = replace(candidate.row, forward_ms=one.forward_ms, step_ms=one.step_ms)


def _state_bytes(model: nn.Module) -> int:
    """Bytes of a model's state dict, a shared tensor once."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
