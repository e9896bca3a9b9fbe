"""What a conversion costs and gains, as data; `views.report` shows it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

from pydantic import Field, computed_field
from torch import nn

from ..networks.outputs import Agreement
from ..networks.sites import Skipped
from ..networks.tracing import trace
from ..planning.plan import ConversionPlan, LayerPlan, taken_from
from ..records import Record
from ..tables import as_html, as_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A count before and after; the unit is the field's name, and None stands for a count that is
    not known.
    """

    before: int | None = None
    after: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def delta(self) -> int | None:
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def percent(self) -> float | None:
        return None if self.delta is None or not self.before else 100 * self.delta / self.before


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsChange(Change):
    """Parameters of the whole model. The elements' weights and positions are a part of `after`."""

    weights: int  # of all elements; folded, of all windows
    positions: int  # and sigmas; tied ones once


@dataclass(frozen=True, kw_only=True, slots=True)
class MacsChange(Change):
    """MACs of the whole model for one input."""

    note: str | None = None  # why they are not known


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One replaced convolution; folded, the plain one in its place, with the kernel count of
    before.
    """

    name: str
    stage: str | None
    kind: str
    kernel_size: tuple[int, ...]
    dilated_size: tuple[int, ...]
    kernel_count: int
    interpolation: str
    tie_group: str | None
    params_before: int  # with bias
    params_after: int  # with bias, and with the positions that are counted here
    weight_params: int  # of params_after: weights of the elements; folded, of the whole window
    position_params: (
        int  # of params_after: positions and sigma; tied ones in the first layer of their group
    )
    macs_before: int | None
    macs_after: int | None
    fit_error: float | None = None  # relative kernel error of a warm start


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsAllowed:
    """What new kernels and positions may use, and what they do use; for a folded model, before
    folding.
    """

    limit: int
    used: int
    exact_count: (
        float | None
    )  # the count that would use all, rounded down to two digits; None where nothing was solved

    @computed_field  # type: ignore[prop-decorator]
    @property
    def slack(self) -> int:
        """Parameters left; negative where a given count is over the budget."""
        return self.limit - self.used


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport(ParamsAllowed):
    name: str  # of the model, a stage or a layer
    kernel_count: int | None  # None: its layers have different counts, stated by rules


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReport(ParamsAllowed):
    scope: str
    units: tuple[UnitReport, ...]  # the exact count of all is None where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a conversion did to the function of a trained network."""

    kernel_error: float | None  # mean of the layers' `fit_error`
    images: int  # with which outputs were compared, and which no layer was fitted to
    same_top1: float | None = None  # as of `Agreement`, of the outputs for them
    kl: float | None = None
    output_error: float | None = None
    shifted: Agreement | None = (
        None  # of the old outputs with those for the images moved by one pixel: a yardstick
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport(Record):
    """The books of a conversion. The layers' parameters and `params_untouched` sum to `params`, and
    so do the MACs.
    """

    format: int = 1
    model: str | None
    input_size: tuple[int, ...] | None
    output: str | None  # the checkpoint folder; None where nothing was written
    params: ParamsChange
    macs: MacsChange
    budget: BudgetReport
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...]
    stages_from: str
    params_untouched: int
    macs_untouched: int | None
    outcome: Outcome | None = (
        None  # and not in the JSON, where nothing was trained or nothing carried out
    )
    plan: Annotated[ConversionPlan, Field(exclude=True)] = field(
        repr=False
    )  # what was carried out; not in the JSON

    @computed_field  # type: ignore[prop-decorator]
    @property
    def folded(self) -> bool:
        """Whether plain convolutions stand in the layers' places."""
        return self.plan.folded

    def with_fit_errors(
        self, errors: Mapping[str, float], outcome: Outcome | None = None
    ) -> "ConversionReport":
        """With the relative kernel errors that `apply_plan_` gave, by layer name."""
        layers = tuple(replace(layer, fit_error=errors.get(layer.name)) for layer in self.layers)
        return replace(self, layers=layers, outcome=outcome)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = Record.to_dict(self)  # not `super()`, which finds no class with slots
        return (
            data
            if self.outcome
            else {name: value for name, value in data.items() if name != "outcome"}
        )

    def __rich__(self) -> Any:
        from ..views.report import report_view

        return report_view(self)

    __str__ = as_text
    _repr_html_ = as_html


def predict_report(plan: ConversionPlan) -> ConversionReport:
    """The report of a plan that has not been carried out; no weights are needed."""
    rows = [_planned_layer(plan, layer) for layer in plan.layers]
    return _report(
        plan, plan.params + sum(row.params_after - row.params_before for row in rows), None, rows
    )


def measure_report(model: nn.Module, plan: ConversionPlan) -> ConversionReport:
    """The report of a converted model, counted on the model itself; equal to
    `predict_report(plan)`.

    Parameters are counted tensor by tensor. MACs come from torch's flop counter in a forward pass
    on the meta device; the construction of the kernels is not counted.
    """
    known = plan.macs is not None and plan.input_size is not None
    flops: Any = trace(model, plan.input_size or ()).flops if known else {}
    construction, rows = 0, []
    for layer in plan.layers:
        row, module = _planned_layer(plan, layer), cast(Any, model.get_submodule(layer.name))
        shared = (module.positions, module.sigma) if row.position_params else ()
        inside = sum((Counter(flops.get(name)) for name in layer.names), Counter[str]())
        construction += inside.total() - inside["convolution"]
        weights, positions = (
            module.weight.numel(),
            sum(part.numel() for part in shared if part is not None),
        )
        row = replace(
            row,
            params_after=weights
            + positions
            + (module.bias.numel() if module.bias is not None else 0),
            weight_params=weights,
            position_params=positions,
            macs_after=inside["convolution"] // 2 if known else None,
        )
        rows.append(row)
    macs = (sum(flops[""].values()) - construction) // 2 if known else None
    return _report(plan, sum(p.numel() for p in model.parameters()), macs, rows)


def _report(
    plan: ConversionPlan, params: int, macs: int | None, layers: Sequence[LayerReport]
) -> ConversionReport:
    untouched_macs = None
    if plan.macs is not None:
        untouched_macs = plan.macs - sum(layer.macs_before or 0 for layer in layers)
        macs = (
            untouched_macs + sum(layer.macs_after or 0 for layer in layers)
            if macs is None
            else macs
        )
    units = []
    for unit in plan.budget:
        # Rounded down: rounded to nearest, a bound just below 35 would read 35.
        exact = None if unit.exact_count is None else int(unit.exact_count * 100) / 100
        units.append(UnitReport(**taken_from(unit, UnitReport) | {"exact_count": exact}))
    return ConversionReport(
        **{name: getattr(plan, name) for name in ("model", "input_size", "skipped", "stages_from")},
        output=None,
        params=ParamsChange(
            before=plan.params,
            after=params,
            weights=sum(layer.weight_params for layer in layers),
            positions=sum(layer.position_params for layer in layers),
        ),
        macs=MacsChange(before=plan.macs, after=macs, note=plan.macs_note),
        budget=BudgetReport(
            scope=plan.scope,
            limit=sum(unit.limit for unit in units),
            used=sum(unit.used for unit in units),
            exact_count=units[0].exact_count if len(units) == 1 else None,
            units=tuple(units),
        ),
        layers=tuple(layers),
        params_untouched=plan.params - sum(layer.params_before for layer in layers),
        macs_untouched=untouched_macs,
        plan=plan,
    )


def _planned_layer(plan: ConversionPlan, layer: LayerPlan) -> LayerReport:
    bias = layer.out_channels * layer.bias
    counted_here = layer.tie_group is None or plan.group(layer.tie_group).layers[0] == layer.name
    positions = layer.position_params if counted_here and not plan.folded else 0
    weights = layer.folded_weights if plan.folded else layer.lines * layer.kernel_count
    return LayerReport(
        **taken_from(layer, LayerReport) | {"position_params": positions},
        params_before=layer.dense_weights + bias,
        params_after=weights + positions + bias,
        weight_params=weights,
        macs_before=layer.macs(layer.kernel_size),
        macs_after=layer.macs(layer.dilated_size),
    )
