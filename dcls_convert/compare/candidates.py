"""Plan and fit each combination of a sweep. What goes wrong in one is its row."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..errors import DclsConvertError, NothingMatchesError, RuleError, one_line
from ..fitting.images import calibrate
from ..networks.sites import ModelConvs
from ..networks.source import ModelSource
from ..options import AUTO, DEFAULT_BUDGET, PlanOptions
from ..pipeline import Start, carry_out_, plan_for
from ..planning.plan import ConversionPlan
from ..progress import Notify
from ..reports.report import predict_report
from .sweep import Asked, Size, SweepRow


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """What all plans of a sweep are made from."""

    model: nn.Module  # may be on the meta device, but for scope "error"
    convs: ModelConvs
    options: PlanOptions  # for all; size, count and budget are those of the combination
    start: Start
    source: ModelSource | None
    command: Callable[[Asked], str]

    def original(self) -> SweepRow:
        return SweepRow(
            asked=None,
            status="original",
            params=self.convs.params,
            macs=self.convs.macs,
            folded_bytes=state_bytes(self.model),
        )

    def candidate(self, asked: Asked) -> Candidate:
        """Plan one combination; one that does not fit has the reason in its row.

        Raises:
            DclsConvertError: None can be planned: nothing matches, or the rules do not fit the model or the options.
        """
        count = AUTO if asked.kernel_count is None else asked.kernel_count
        budget = DEFAULT_BUDGET if asked.budget is None else asked.budget
        options = replace(self.options, dilated_size=asked.size, kernel_count=count, budget=budget)
        row = SweepRow(asked=asked, status="done", command=self.command(asked))
        try:
            plan = plan_for(self.model, options, self.start, source=self.source, convs=self.convs)
        except (NothingMatchesError, RuleError):
            raise
        except DclsConvertError as error:
            return Candidate(replace(row, status="does not fit", reason=str(error)))
        except Exception as error:
            failed = Candidate(row)
            failed.fail(error, "planning")
            return failed
        return Candidate(self._planned(row, plan), plan)

    def _planned(self, row: SweepRow, plan: ConversionPlan) -> SweepRow:
        report = predict_report(plan)
        return replace(
            row,
            layers=len(plan.layers),
            dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
            kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
            elements=report.params.weights,
            params=report.params.after,
            macs=report.macs.after,
            folded_bytes=folded_bytes(self.model, plan),
        )


def fit_(candidate: Candidate, model: nn.Module, start: Start, *, note: Notify, notify: Notify) -> None:
    """Convert a copy of the trained model, and state in the row what that keeps."""
    if candidate.plan is None:
        return
    try:
        done = carry_out_(copy.deepcopy(model), candidate.plan, start, note=note, notify=notify)
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


def with_images_read(start: Start, model: nn.Module, candidate: Candidate, *, note: Notify) -> Start:
    """The start with its images in memory, so that they are read once, for all candidates."""
    if start.calibration is None or candidate.plan is None:
        return start
    return replace(start, calibration=calibrate(model, candidate.plan, start.calibration, note=note))


def state_bytes(model: nn.Module) -> int:
    """Bytes of a model's state dict, a shared tensor once."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def folded_bytes(model: nn.Module, plan: ConversionPlan) -> int:
    """Bytes of the state dict of the converted model when folded.

    Args:
        model: The original.
    """
    total = state_bytes(model)
    for layer in plan.layers:
        weight = model.get_submodule(layer.name).weight
        assert isinstance(weight, Tensor)
        total += (layer.folded_weights - layer.dense_weights) * weight.element_size()
    return total
