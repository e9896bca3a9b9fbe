"""Plan, fit and time each combination of a sweep. What goes wrong in one is its row."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, DclsConvertError, NothingMatchesError, PlanError, RuleError, one_line, shown
from ..fitting.images import calibrate
from ..options import AUTO, DEFAULT_BUDGET
from ..pipeline import Job
from ..planning.plan import ConversionPlan
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

    Args:
        job: With what all combinations have in common.
        asked: The combinations.
        command: The one that converts as a combination.
        timing, slower: How to measure times, and percent, for `choose`.

    Raises:
        DclsConvertError: No combination can be planned, or the network cannot be built.
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
    """One combination; one that does not fit has the reason in its row.

    Raises:
        DclsConvertError: None can be planned: nothing matches, or the rules do not fit the model or the options.
    """
    count = AUTO if asked.kernel_count is None else asked.kernel_count
    budget = DEFAULT_BUDGET if asked.budget is None else asked.budget
    candidate = Candidate(SweepRow(asked=asked, status="done", command=command))
    try:
        plan = job.plan(replace(job.options, dilated_size=asked.size, kernel_count=count, budget=budget))
    except (NothingMatchesError, RuleError):
        raise
    except DclsConvertError as error:
        candidate.row = replace(candidate.row, status="does not fit", reason=str(error))
        return candidate
    except Exception as error:
        candidate.fail(error, "planning")
        return candidate
    report = predict_report(plan)
    row = replace(
        candidate.row,
        layers=len(plan.layers),
        dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
        kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
        folded_bytes=_folded_bytes(job.meta, plan),
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
        candidate.row = replace(
            candidate.row,
            kernel_error=outcome.kernel_error,
            images=outcome.images,
            output_error=outcome.output_error if outcome.images else done.moved,
            same_top1=outcome.same_top1,
        )


def _time(job: Job, candidates: Sequence[Candidate], settings: TimingSettings, device: torch.device) -> None:
    """Measure those that have a plan, and the original, and put the times into their rows."""
    size = job.convs.input_size
    assert size is not None
    network = job.network.to(device)
    timed: list[tuple[Candidate, Timed]] = []
    for candidate in candidates:
        if candidate.plan is None and candidate.row.asked is not None:
            continue
        if candidate.plan is not None:
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


def _folded_bytes(model: nn.Module, plan: ConversionPlan) -> int:
    """Bytes of the state dict of the converted model when folded; `model` is the original."""
    total = _state_bytes(model)
    for layer in plan.layers:
        weight = model.get_submodule(layer.name).weight
        assert isinstance(weight, Tensor)
        total += (layer.folded_weights - layer.dense_weights) * weight.element_size()
    return total
