"""What would become of the models of timm's and torchvision's registries: a row of plain values for each."""

import fnmatch
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import DclsConvertError, ModelError, NothingMatchesError, PlanError, RuleError, did_you_mean, shown
from ..layers.geometry import size_text
from ..networks.sites import ModelConvs, find_convs, kinds_of_convs
from ..networks.source import ModelSource, build_model, registry_names, stated_input_size
from ..options import AUTO, DEFAULT_BUDGET, Scope, Tie
from ..planning.plan import ConversionPlan
from ..planning.planner import plan_conversion
from ..planning.rules import RuleSet
from .report import Change, predict_report

Status = Literal["planned", "nothing matches", "does not fit", "failed"]
WILDCARDS = "*?["
UNKNOWN = Change(before=None, after=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyOptions:
    """What is planned for every model; as in `plan_conversion`."""

    dilated_size: int | tuple[int, ...] | None = None
    rules: RuleSet | str = AUTO
    budget: float | str = DEFAULT_BUDGET
    scope: Scope = "model"
    tie: Tie = "stage"
    interpolation: str | None = None
    input_size: tuple[int, ...] | None = None  # for all models; without it, the one that each states


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """One model, and what would become of it."""

    name: str  # "timm:convnext_tiny"
    status: Status
    reason: str | None = None  # one line; None where it is planned
    convs: tuple[tuple[str, int], ...] = ()  # ("depthwise 7x7", 18) for all its convolutions, the most frequent first
    replaced: tuple[tuple[str, int], ...] = ()  # ("depthwise 7x7", 18) for those that would be replaced
    dilated_sizes: tuple[tuple[int, ...], ...] = ()  # all that occur
    kernel_counts: tuple[int, ...] = ()  # all that occur
    rules: str | None = None  # file or name
    input_size: tuple[int, ...] | None = None
    params: Change = UNKNOWN
    macs: Change = UNKNOWN  # for one input
    macs_note: str | None = None  # why there are none

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; parameters and MACs as in the report of a conversion."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "input_size": list(self.input_size) if self.input_size else None,
            "rules": self.rules,
            "convolutions": dict(self.convs),
            "replaced": dict(self.replaced),
            "dilated_sizes": [list(size) for size in self.dilated_sizes],
            "kernel_counts": list(self.kernel_counts),
            "params": self.params.to_dict(),
            "macs": self.macs.to_dict() | {"note": self.macs_note},
        }


def names_matching(pattern: str | None, known: Sequence[str] | None = None) -> list[str]:
    """Names of both registries, with their prefix, in the order timm, torchvision.

    Args:
        pattern: A shell pattern for names with or without prefix: `convnext_*`, `torchvision:*`. Without wildcards it
            is a name, or where no model is called so, a part of names. Case does not matter. None is for all.
        known: Names to choose from, with prefix; those of the registries without it.

    Raises:
        ModelError: No name matches; the closest ones.
    """
    known = registry_names() if known is None else known
    if pattern is None:
        return list(known)
    wanted = pattern.lower()
    found = _matching(wanted, known)
    if not found and wanted and not set(wanted) & set(WILDCARDS):
        prefix, colon, part = wanted.rpartition(":")
        found = _matching(f"{prefix}{colon}*{part}*", known)
    if not found:
        bare = wanted.rpartition(":")[2].strip("".join(WILDCARDS))
        near = did_you_mean(bare, (name.partition(":")[2] for name in known), 3)
        raise ModelError(f"no model of timm or torchvision matches {shown(pattern)!r}{near}")
    return found


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    return [
        name
        for name in known
        if any(fnmatch.fnmatchcase(part.lower(), pattern) for part in (name, name.partition(":")[2]))
    ]


def survey_model(name: str, options: SurveyOptions) -> ModelRow:
    """Plan one model without its weights.

    Args:
        name: With its prefix, as `names_matching` gives it.
        options: For the plan.

    Raises:
        Exception: Bugs alone; a model that cannot be built or converted is a row that says why.
    """
    source = ModelSource(name=name)
    try:
        model = build_model(source, device="meta", offline=True)
    except ModelError as error:
        return ModelRow(name=name, status="failed", reason=str(error))
    try:
        convs = find_convs(model, options.input_size or stated_input_size(source, model))
    except PlanError as error:  # an input size of the user's that is not for such a model
        return ModelRow(name=name, status="does not fit", reason=str(error))
    try:
        plan = plan_conversion(
            convs,
            options.rules,
            dilated_size=options.dilated_size,
            scope=options.scope,
            tie=options.tie,
            budget=options.budget,
            interpolation=options.interpolation,
            model=name,
        )
        if convs.macs is None and options.input_size is not None:
            raise PlanError(f"input size {size_text(options.input_size)}: {convs.macs_note}")
    except NothingMatchesError as error:
        return _unplanned(name, convs, "nothing matches", error)
    except (PlanError, RuleError) as error:
        return _unplanned(name, convs, "does not fit", error)
    return _planned(name, convs, plan)


def _unplanned(name: str, convs: ModelConvs, status: Status, reason: DclsConvertError) -> ModelRow:
    return ModelRow(
        name=name,
        status=status,
        reason=str(reason),
        convs=tuple(kinds_of_convs(convs).most_common()),
        input_size=convs.input_size,
        params=Change(before=convs.params, after=None),
        macs=Change(before=convs.macs, after=None),
        macs_note=convs.macs_note,
    )


def _planned(name: str, convs: ModelConvs, plan: ConversionPlan) -> ModelRow:
    report = predict_report(plan)
    replaced = Counter(f"{layer.kind} {size_text(layer.kernel_size)}" for layer in plan.layers)
    return ModelRow(
        name=name,
        status="planned",
        convs=tuple(kinds_of_convs(convs).most_common()),
        replaced=tuple(replaced.most_common()),
        dilated_sizes=tuple(sorted({layer.dilated_size for layer in plan.layers})),
        kernel_counts=tuple(sorted({layer.kernel_count for layer in plan.layers})),
        rules=plan.rules,
        input_size=plan.input_size,
        params=report.params,
        macs=report.macs,
        macs_note=plan.macs_note,
    )


def set_up_worker() -> None:
    """For a process that surveys one model after another: imports, one thread, no word on stderr."""
    torch.set_num_threads(1)  # there is a process for every core, and hollow tensors compute nothing
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    registry_names()  # imports timm and torchvision
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be searched again after every model
