"""Plan, fit and time each combination of a sweep. What goes wrong in one is its row."""

import contextlib
import copy
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..depthwise.choice import depthwise_way
from ..depthwise.eager import is_channels_last
from ..errors import CheckpointError, DclsConvertError, NothingMatchesError, PlanError, RuleError, one_line, shown
from ..fitting.images import calibrate
from ..layers.dcls_conv import DclsConvNd
from ..networks.outputs import tensors_in
from ..networks.running import run
from ..options import AUTO, DEFAULT_BUDGET
from ..pipeline import Job
from ..planning.plan import ConversionPlan, taken_from
from ..reports.report import predict_report
from ..surgery.start import apply_plan_
from .sweep import Asked, Size, Sweep, SweepRow, Timing, TimingSettings, choose, with_dominated

LEAST_ROUNDS, MOST_ROUNDS = 3, 100
CALLS_ON_GPU = 5  # a measured run on a GPU is their mean, since the end of the last alone is waited for


@dataclass(slots=True)
class Candidate:
    """A combination, or the original, and what is known of it."""

    row: SweepRow
    plan: ConversionPlan | None = None  # None: the original, or it does not fit
    model: nn.Module | None = None  # while it is timed
    runs: list[tuple[float, float]] = field(default_factory=list)  # milliseconds of forward passes and training steps

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
            kind = "" if isinstance(error, DclsConvertError) else f"{type(error).__name__}: "
            self.change(status="failed", reason=f"{what}: {kind}{one_line(error)[:200]}")
            self.plan = self.model = None


def combinations(sizes: Sequence[Size], counts: Sequence[int] | None, budgets: Sequence[float] | None) -> list[Asked]:
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
    """All rows, with the commands that convert so; KeyboardInterrupt ends it early, with what is known by then."""
    convs, source = job.convs, job.source
    assert source is not None
    if job.elements is not None:
        raise CheckpointError(f"{job.where}: has elements of its own, so there is nothing to compare")
    if convs.macs is None and (job.input_size is not None or (timing and convs.input_size is None)):
        raise PlanError(f"{shown(source.name)}: {convs.macs_note}")
    folded_bytes = _state_bytes(job.meta)
    original = SweepRow(asked=None, status="original", params=convs.params, macs=convs.macs, folded_bytes=folded_bytes)
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
    count = AUTO if asked.kernel_count is None else asked.kernel_count
    budget = DEFAULT_BUDGET if asked.budget is None else asked.budget
    try:
        plan = job.plan(replace(job.options, dilated_size=asked.size, kernel_count=count, budget=budget))
    except (NothingMatchesError, RuleError):
        raise
    except DclsConvertError as error:
        candidate.change(status="does not fit", reason=str(error))
        return
    report = predict_report(plan)
    grown = sum(
        (layer.folded_weights - layer.dense_weights) * cast(Any, job.meta.get_submodule(layer.name)).weight.itemsize
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
    if job.calibration is not None:  # read once, for all candidates
        job.calibration = calibrate(job.network, plan, job.calibration, note=job.note)
    with candidate.doing("fitting"):
        done = job.convert(plan, model=copy.deepcopy(job.network))
        if (outcome := done.report.outcome) is not None:
            moved = {} if outcome.images else {"output_error": done.moved}
            candidate.change(**taken_from(outcome, SweepRow) | moved)


def _time(job: Job, candidates: Sequence[Candidate], settings: TimingSettings, device: torch.device) -> None:
    """Measure the original and those that have a plan, which take turns, and put the times into their rows."""
    assert job.convs.input_size is not None
    network, clock = job.network.to(device), Clock(job.convs.input_size, settings, device)
    for candidate in candidates:
        if candidate.plan is not None or candidate.row.asked is None:
            job.notify(f"building {candidate.row.window}")
            with candidate.doing("building"):
                candidate.model = network if candidate.plan is None else converted_copy(network, candidate.plan)
    begun = time.perf_counter()
    for count in range(-1, MOST_ROUNDS):  # a round for warmth first
        spent = time.perf_counter() - begun
        going = [(candidate, candidate.model) for candidate in candidates if candidate.model is not None]
        if (spent >= settings.seconds and count >= LEAST_ROUNDS) or not going:
            break
        job.notify("warming up" if count < 0 else f"timing, round {count + 1}, {spent:.0f} of {settings.seconds:g} s")
        for candidate, model in going:
            with candidate.doing("timing"):
                if count < 0:
                    candidate.change(ways=dict(clock.ways(model)))
                times = clock.measure(model)
                if count >= 0:
                    candidate.runs.append(times)
                    forward, step = zip(*candidate.runs, strict=True)
                    candidate.change(forward_ms=summary(forward), step_ms=summary(step))


def _state_bytes(model: nn.Module) -> int:
    """Bytes of a model's state dict, a shared tensor once."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_device(name: str) -> torch.device:
    """The device of this name; DclsConvertError where nothing can be timed on it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shown(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


def converted_copy(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """With random elements; what is not converted is the model's own, so that memory holds little more than one."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    converted = copy.deepcopy(model, shared)
    apply_plan_(converted, plan, init="random")
    return converted


def summary(runs: Sequence[float]) -> Timing:
    """Quartiles, by linear interpolation."""
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


class Clock:
    """Measures models on the same images."""

    def __init__(self, input_size: Sequence[int], settings: TimingSettings, device: torch.device) -> None:
        images = torch.randn(settings.batch, *input_size, generator=torch.Generator().manual_seed(0))
        self.images, self.device, self.amp = images.to(device), device, settings.amp
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.amp)

    def measure(self, model: nn.Module) -> tuple[float, float]:
        """A forward pass and a training step, whose learning rate is 0: it changes running statistics alone."""

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with self.autocast:
                outputs = tensors_in(run(model, self.images))
                loss = sum(output.float().square().mean() for output in outputs if output.requires_grad)
            torch.autograd.backward(torch.as_tensor(loss))
            optimizer.step()

        try:
            forward_ms = self._milliseconds(lambda: self._forward(model.eval()))
            optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
            return forward_ms, self._milliseconds(step)
        finally:
            model.zero_grad(set_to_none=True)

    def ways(self, model: nn.Module) -> Counter[str]:
        """Of `depthwise_way`: how many converted layers go each of them in a forward pass."""
        ways = dict[Any, str]()

        def watch(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ways.setdefault(layer, self._way(layer, inputs[0]))

        hooks = [part.register_forward_hook(watch) for part in model.modules() if isinstance(part, DclsConvNd)]
        try:
            self._forward(model.eval())
        finally:
            for hook in hooks:
                hook.remove()
        return Counter(ways.values())

    @torch.no_grad()
    def _forward(self, model: nn.Module) -> None:
        with self.autocast:
            run(model, self.images)

    def _milliseconds(self, call: Callable[[], object]) -> float:
        calls = CALLS_ON_GPU if self.device.type != "cpu" else 1
        self._wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return 1e3 * (time.perf_counter() - begun) / calls

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _way(self, layer: Any, input: Tensor) -> str:
        if layer.dims != 2 or input.dim() != 4:
            return "torch"
        input, padding = layer.padded_and_left(input)
        dtype = torch.bfloat16 if self.amp else input.dtype
        size = (layer.out_channels, layer.in_channels // layer.groups, *layer.dilated_kernel_size)
        geometry = (size, layer.stride, padding, layer.dilation, layer.groups)
        return depthwise_way(self.device, dtype, is_channels_last(input), tuple(input.shape), *geometry)
