"""Plan, fit and time each combination of a sweep. An error in one is a row with its reason."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from ..pipeline.conversion import convert_network
from ..pipeline.loaded import LoadedNetwork
from ..pipeline.resolved import ResolvedRequest, resolve
from ..planning.windows import sizes_to_try
from ..records import taken_from
from ..reports.report import predict_report
from ..tables import counted
from .sweep import (
    Asked,
    AskedSize,
    Recommendation,
    Sweep,
    SweepRow,
    TimingSettings,
    choose,
    with_dominated,
)
from .timing import converted_copy, measure, summary

MIN_ROUNDS = 3  # of timing, whatever time they take
MAX_ROUNDS = 100


@dataclass(slots=True)
class Candidate:
    """A combination, or the original, and what is known of it."""

    row: SweepRow
    # None: the original, or a combination that cannot be used.
    resolved: ResolvedRequest | None = None
    model: nn.Module | None = None  # while it is timed
    forward_ms: list[float] = field(default_factory=list)  # of each round
    step_ms: list[float] = field(default_factory=list)  # of each round

    @property
    def is_original(self) -> bool:
        return self.row.asked is None

    def change(self, **known: Any) -> None:
        """Replace fields of the row."""
        self.row = replace(self.row, **known)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """If the code inside fails, the row gets the reason, and the candidate goes no further."""
        try:
            yield
        except (NothingMatchesError, RuleError):  # no combination can be planned
            raise
        except Exception as error:
            self.resolved = None
            self.model = None
            if what == "planning" and isinstance(error, DclsConvertError):
                self.change(status="does not fit", reason=str(error))
                return
            message = one_line(error)[:200]
            if not isinstance(error, DclsConvertError):
                message = f"{type(error).__name__}: {message}"
            self.change(status="failed", reason=f"{what}: {message}")


def combinations(
    sizes: Sequence[AskedSize], counts: Sequence[int] | None, budgets: Sequence[float] | None
) -> list[Asked]:
    """Every size with every count, or with every budget."""
    asked = []
    for size in sizes:
        for count in counts or (None,):
            for budget in budgets or (None,):
                asked.append(Asked(size=size, kernel_count=count, budget=budget))
    return asked


def usual_sizes(loaded: LoadedNetwork) -> Sequence[AskedSize]:
    """The windows of a sweep that states none: sizes, or growths if kernels have several sizes."""
    options = replace(loaded.request.options, dilated_size=AUTO, kernel_count=AUTO)
    return sizes_to_try(resolve(loaded, options).plan.layers)


def make_sweep(
    loaded: LoadedNetwork,
    asked: Sequence[Asked],
    command: Callable[[Asked], str],
    *,
    timing: tuple[TimingSettings, torch.device] | None = None,
    slower: float,
) -> Sweep:
    """Plan, fit and time every combination; KeyboardInterrupt ends this early, with what is known.

    Args:
        loaded: The network and the options that the combinations replace.
        asked: The combinations.
        command: Makes the command line, or the call, that converts with a combination.
        timing: None: nothing is timed.
        slower: Percent by which the cost of the recommended size may grow.

    Raises:
        CheckpointError: The weights have elements already.
        PlanError: The MACs are not known, but the input size was given or times are wanted.
        NothingMatchesError, RuleError: No combination can be planned.
    """
    request = loaded.request
    convs = loaded.convs
    name = type(request.model).__name__
    if loaded.source is not None:
        name = loaded.source.name
    if loaded.elements is not None:
        raise CheckpointError(
            f"{request.weights_name}: has elements of its own, so there is nothing to compare"
        )
    needs_input_size = timing is not None and convs.input_size is None
    if convs.macs is None and (request.input_size is not None or needs_input_size):
        raise PlanError(f"{shown(name)}: {convs.macs_note}")
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
        _plan_all_(loaded, asked, command, candidates)
        planned = [candidate for candidate in candidates if candidate.resolved is not None]
        if request.trained:
            _fit_all(loaded, planned)
        if timing is not None and planned:
            settings, device = timing
            _time_all(loaded, candidates, settings, device)
    except KeyboardInterrupt:
        interrupted = True
    rows = with_dominated([candidate.row for candidate in candidates])
    choice = choose(rows, slower)
    if interrupted:
        complete = _complete_rows(rows, fitted=request.trained, timed=timing is not None)
        choice = Recommendation(why=f"it saw {complete} of {counted(len(asked), 'row')} in full")
    return Sweep(
        model=name,
        input_size=convs.input_size,
        macs_note=convs.macs_note,
        rows=rows,
        timing=timing[0] if timing else None,
        slower=slower,
        interrupted=interrupted,
        choice=choice,
    )


def _complete_rows(rows: Sequence[SweepRow], *, fitted: bool, timed: bool) -> int:
    """How many rows have all that they were to have, or a reason why not; without the original."""
    complete = 0
    for row in rows[1:]:
        # A row is "done" from its planning on, unless something fails.
        has_reason = row.status != "done"
        lacks_error = fitted and row.kernel_error is None
        lacks_times = timed and (row.step_ms is None or row.step_ms.runs < MIN_ROUNDS)
        if has_reason or not (lacks_error or lacks_times):
            complete += 1
    return complete


def _plan_all_(
    loaded: LoadedNetwork,
    asked: Sequence[Asked],
    command: Callable[[Asked], str],
    candidates: list[Candidate],
) -> None:
    """Append a candidate for each combination, as soon as it is planned."""
    for number, combination in enumerate(asked, 1):
        loaded.notify(f"planning {number} of {len(asked)}")
        row = SweepRow(asked=combination, status="done", command=command(combination))
        candidate = Candidate(row)
        with candidate.doing("planning"):
            _plan(loaded, candidate, combination)
        candidates.append(candidate)


def _plan(loaded: LoadedNetwork, candidate: Candidate, asked: Asked) -> None:
    options = replace(
        loaded.request.options,
        dilated_size=asked.size,
        kernel_count=asked.kernel_count or AUTO,
        budget=asked.budget or DEFAULT_BUDGET,
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
        more_weights = layer.folded_weights - layer.dense_weights
        folded_bytes += more_weights * module.weight.itemsize
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


def _fit_all(loaded: LoadedNetwork, planned: Sequence[Candidate]) -> None:
    for number, candidate in enumerate(planned, 1):
        loaded.notify(f"fitting {candidate.row.window}, {number} of {len(planned)}")
        with candidate.doing("fitting"):
            _fit(loaded, candidate)


def _fit(loaded: LoadedNetwork, candidate: Candidate) -> None:
    """Convert a copy of the trained network, and state in the row what that keeps."""
    assert candidate.resolved is not None
    copied = copy.deepcopy(loaded.network)
    conversion = convert_network(loaded, candidate.resolved, model=copied)
    outcome = conversion.report.outcome
    if outcome is None:
        return
    known = taken_from(outcome, SweepRow)
    if not outcome.images:
        known["output_error"] = conversion.moved  # for random images
    candidate.change(**known)


def _time_all(
    loaded: LoadedNetwork,
    candidates: Sequence[Candidate],
    settings: TimingSettings,
    device: torch.device,
) -> None:
    """Time the original and the planned candidates in rounds, one after another in each."""
    assert loaded.convs.input_size is not None
    network = loaded.network.to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(settings.batch, *loaded.convs.input_size, generator=generator).to(device)
    for candidate in candidates:
        if candidate.is_original or candidate.resolved is not None:
            loaded.notify(f"building {candidate.row.window}")
            with candidate.doing("building"):
                if candidate.resolved is None:
                    candidate.model = network
                else:
                    candidate.model = converted_copy(network, candidate.resolved.plan)
    began = time.perf_counter()
    loaded.notify("warming up")
    _time_round(candidates, images, settings, keep=False)
    for number in range(MAX_ROUNDS):
        spent = time.perf_counter() - began
        is_enough = spent >= settings.seconds and number >= MIN_ROUNDS
        has_models = any(candidate.model is not None for candidate in candidates)
        if is_enough or not has_models:
            break
        loaded.notify(f"timing, round {number + 1}, {spent:.0f} of {settings.seconds:g} s")
        _time_round(candidates, images, settings, keep=True)


def _time_round(
    candidates: Sequence[Candidate], images: Tensor, settings: TimingSettings, *, keep: bool
) -> None:
    """Time each candidate that has a model once; `keep` its times, and put them into its row."""
    for candidate in candidates:
        if candidate.model is None:
            continue
        with candidate.doing("timing"):
            forward_ms, step_ms = measure(candidate.model, images, amp=settings.amp)
            if keep:
                candidate.forward_ms.append(forward_ms)
                candidate.step_ms.append(step_ms)
                candidate.change(
                    forward_ms=summary(candidate.forward_ms), step_ms=summary(candidate.step_ms)
                )


def _state_bytes(model: nn.Module) -> int:
    """Bytes of a model's state dict; a shared tensor counts once."""
    tensors: dict[int, Tensor] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        tensors[id(tensor)] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
