"""Plan, fit and time each combination of a sweep. What goes wrong in one is its row."""

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import (
    CheckpointError,
    DclsConvertError,
    NothingMatchesError,
    PlanError,
    RuleError,
    one_line,
    shown,
)
from ..options import AUTO, DEFAULT_BUDGET
from ..pipeline import Job
from ..planning.plan import ConversionPlan, taken_from
from ..planning.planner import larger_sizes
from ..reports.report import predict_report
from .sweep import Asked, Size, Sweep, SweepRow, TimingSettings, choose, with_dominated
from .timing import converted_copy, measure, summary

LEAST_ROUNDS, MOST_ROUNDS = 3, 100


@dataclass(slots=True)
class Candidate:
    """A combination, or the original, and what is known of it."""

    row: SweepRow
    plan: ConversionPlan | None = None  # None: the original, or it does not fit
    model: nn.Module | None = None  # while it is timed
    runs: list[tuple[float, float]] = field(
        default_factory=list
    )  # milliseconds of forward passes and training steps

    def change(self, **known: Any) -> None:
        self.row = replace(self.row, **known)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Where this fails, the row keeps what is known, with the reason why there is no more."""
        try:
            yield
        except (NothingMatchesError, RuleError):  # no combination can be planned
            raise
        except Exception as error:
            self.plan = self.model = None
            if what == "planning" and isinstance(error, DclsConvertError):
                self.change(status="does not fit", reason=str(error))
                return
            kind = "" if isinstance(error, DclsConvertError) else f"{type(error).__name__}: "
            self.change(status="failed", reason=f"{what}: {kind}{one_line(error)[:200]}")


def combinations(
    sizes: Sequence[Size], counts: Sequence[int] | None, budgets: Sequence[float] | None
) -> list[Asked]:
    """Every size with every count, or with every budget."""
    every = itertools.product(sizes, counts or (None,), budgets or (None,))
    return [Asked(size=size, kernel_count=count, budget=budget) for size, count, budget in every]


def usual_sizes(job: Job) -> list[int]:
    """The windows of a sweep that states none: of the smallest kernel, and larger ones."""
    larger = larger_sizes(
        job.plan(replace(job.options, dilated_size=AUTO, kernel_count=AUTO)).layers
    )
    return [larger[0] - 2, *larger[:-1]]


def make_sweep(
    job: Job,
    asked: Sequence[Asked],
    command: Callable[[Asked], str],
    *,
    timing: tuple[TimingSettings, torch.device] | None = None,
    slower: float,
) -> Sweep:
    """All rows, with the commands that convert so; KeyboardInterrupt ends it early, with what is
    known by then."""
    convs, source = job.convs, job.source
    assert source is not None
    if job.elements is not None:
        raise CheckpointError(
            f"{job.where}: has elements of its own, so there is nothing to compare"
        )
    if convs.macs is None and (job.input_size is not None or (timing and convs.input_size is None)):
        raise PlanError(f"{shown(source.name)}: {convs.macs_note}")
    folded_bytes = _state_bytes(job.meta)
    original = SweepRow(
        asked=None,
        status="original",
        params=convs.params,
        macs=convs.macs,
        folded_bytes=folded_bytes,
    )
    candidates = [Candidate(original)]
    interrupted = False
    try:
        for number, one in enumerate(asked, 1):
            job.notify(f"planning {number} of {len(asked)}")
            candidate = Candidate(SweepRow(asked=one, status="done", command=command(one)))
            with candidate.doing("planning"):
                _plan(job, candidate, one)
            candidates.append(candidate)
        planned = [(candidate, candidate.plan) for candidate in candidates if candidate.plan]
        for number, (candidate, plan) in enumerate(planned if job.trained else [], 1):
            job.notify(f"fitting {candidate.row.window}, {number} of {len(planned)}")
            _fit(job, candidate, plan)
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


def _plan(job: Job, candidate: Candidate, asked: Asked) -> None:
    count, budget = asked.kernel_count or AUTO, asked.budget or DEFAULT_BUDGET
    plan = job.plan(
        replace(job.options, dilated_size=asked.size, kernel_count=count, budget=budget)
    )
    report = predict_report(plan)
    grown = sum(
        (layer.folded_weights - layer.dense_weights)
        * cast(Any, job.meta.get_submodule(layer.name)).weight.itemsize
        for layer in plan.layers
    )
    candidate.plan = plan
    candidate.change(
        layers=len(plan.layers),
        dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
        kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
        elements=report.params.weights,
        params=report.params.after,
        macs=report.macs.after,
        folded_bytes=_state_bytes(job.meta) + grown,
    )


def _fit(job: Job, candidate: Candidate, plan: ConversionPlan) -> None:
    """Convert a copy of the trained network, and state in the row what that keeps."""
    with candidate.doing("fitting"):
        done = job.convert(plan, model=copy.deepcopy(job.network))
        if (outcome := done.report.outcome) is not None:
            moved = {} if outcome.images else {"output_error": done.moved}
            candidate.change(**taken_from(outcome, SweepRow) | moved)


def _time(
    job: Job, candidates: Sequence[Candidate], settings: TimingSettings, device: torch.device
) -> None:
    """Measure the original and those that have a plan, which take turns, and put the times into
    their rows."""
    assert job.convs.input_size is not None
    network = job.network.to(device)
    images = torch.randn(
        settings.batch, *job.convs.input_size, generator=torch.Generator().manual_seed(0)
    ).to(device)
    for candidate in candidates:
        if candidate.plan is not None or candidate.row.asked is None:
            job.notify(f"building {candidate.row.window}")
            with candidate.doing("building"):
                candidate.model = (
                    network if candidate.plan is None else converted_copy(network, candidate.plan)
                )
    begun = time.perf_counter()
    for count in range(-1, MOST_ROUNDS):  # a round for warmth first
        spent = time.perf_counter() - begun
        going = [
            (candidate, candidate.model) for candidate in candidates if candidate.model is not None
        ]
        if (spent >= settings.seconds and count >= LEAST_ROUNDS) or not going:
            break
        job.notify(
            "warming up"
            if count < 0
            else f"timing, round {count + 1}, {spent:.0f} of {settings.seconds:g} s"
        )
        for candidate, model in going:
            with candidate.doing("timing"):
                times = measure(model, images, amp=settings.amp)
                if count >= 0:
                    candidate.runs.append(times)
                    forward, step = zip(*candidate.runs, strict=True)
                    candidate.change(forward_ms=summary(forward), step_ms=summary(step))


def _state_bytes(model: nn.Module) -> int:
    """Bytes of a model's state dict, a shared tensor once."""
    tensors: dict[int, Tensor] = {
        id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
