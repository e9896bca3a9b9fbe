"""What a conversion costs and gains, as data; `views.report` shows it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, computed_field
from torch import nn

from ..networks.model_outputs import Agreement
from ..networks.sites import Skipped
from ..networks.tracing import trace
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..records import Record, taken_from
from ..tables import as_html, as_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A count before and after, None if it is not known. The unit is the field's name."""

    before: int | None = None
    after: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def delta(self) -> int | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def percent(self) -> float | None:
        if self.delta is None or not self.before:
            return None
        return 100 * self.delta / self.before


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsChange(Change):
    """Parameters of the whole model. The elements' weights and positions are a part of `after`."""

    weights: int  # weights of all elements; of a folded model, cells of all windows
    positions: int  # positions and sigmas; tied ones are counted once


@dataclass(frozen=True, kw_only=True, slots=True)
class MacsChange(Change):
    """MACs of the whole model for one input."""

    note: str | None = None  # why they are not known


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One replaced convolution.

    In a folded model a plain convolution is in its place; `kernel_count` is that before folding.
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
    params_after: int  # with bias, and with `position_params`
    weight_params: int  # part of params_after: weights of the elements; folded, of the whole window
    # Part of params_after: positions and sigma. Tied ones are counted in their group's first layer.
    position_params: int
    macs_before: int | None
    macs_after: int | None
    fit_error: float | None = None  # relative error of the kernel that a start gave
    output_error: float | None = None  # relative error of the outputs, on a calibration's images
    # What raises `output_error` beyond what the elements can do; absent from the JSON if empty.
    error_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsAllowed:
    """How many parameters new kernels and positions may use, and how many they do use.

    For a folded model, the numbers before folding.
    """

    limit: int
    used: int
    # The count that would use all, rounded down to two digits; None if layers' counts differ.
    exact_count: float | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def slack(self) -> int:
        """Parameters left; negative where a given count is over the budget."""
        return self.limit - self.used


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport(ParamsAllowed):
    """The budget of one unit: the model, a stage or a layer."""

    name: str
    kernel_count: int | None  # None: its layers have different counts, stated by rules


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetReport(ParamsAllowed):
    """The budget of the whole model. `exact_count` is None if there are several units."""

    scope: str
    units: tuple[UnitReport, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a conversion did to the function of a trained network."""

    kernel_error: float | None  # mean of the layers' `fit_error`
    images: int  # held-out images, or crops of them, on which outputs were compared
    # Images that the new layers were fitted to; not in the JSON.
    fitted_images: Annotated[int, Field(exclude=True)] = 0
    # Held-out images that `images` are crops of; 0 if they are no crops. Not in the JSON.
    images_cropped: Annotated[int, Field(exclude=True)] = 0
    same_top1: float | None = None  # this and the next two: as in `Agreement`
    kl: float | None = None
    output_error: float | None = None
    # A yardstick: agreement of the old outputs with the old outputs for images moved by one pixel.
    shifted: Agreement | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionReport(Record):
    """What a conversion changes: parameters, MACs, budget and layers.

    The layers' parameters and `params_untouched` sum to `params`, and so do the MACs.
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
    # None, and absent from the JSON, if nothing was trained or nothing was carried out.
    outcome: Outcome | None = None
    # The plan that was carried out; not in the JSON.
    plan: Annotated[ConversionPlan, Field(exclude=True)] = field(repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def folded(self) -> bool:
        """Whether plain convolutions stand in the layers' places."""
        return self.plan.folded

    @computed_field  # type: ignore[prop-decorator]
    @property
    def layers_beyond_map(self) -> int:
        """Layers whose windows have cells that never meet the map, at the input size."""
        return sum(layer.exceeds_map for layer in self.plan.layers)

    def with_errors(
        self,
        kernel_errors: Mapping[str, float],
        output_errors: Mapping[str, float],
        outcome: Outcome | None = None,
        *,
        reasons: Mapping[str, tuple[str, ...]],
    ) -> "ConversionReport":
        """The report with the errors and reasons that `apply_plan_` gave, by layer name."""
        layers = []
        for layer in self.layers:
            of_kernel = kernel_errors.get(layer.name)
            of_outputs = output_errors.get(layer.name)
            layers.append(
                replace(
                    layer,
                    fit_error=of_kernel,
                    output_error=of_outputs,
                    error_reasons=reasons.get(layer.name, ()),
                )
            )
        return replace(self, layers=tuple(layers), outcome=outcome)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        data = Record.to_dict(self)  # not `super()`, which finds no class with slots
        if self.outcome is None:
            del data["outcome"]
        for layer in data["layers"]:
            if not layer["error_reasons"]:
                del layer["error_reasons"]
        return data

    def __rich__(self) -> Any:
        from ..views.report import IN_PYTHON, report_view

        return report_view(self, advice=IN_PYTHON)

    __str__ = as_text
    _repr_html_ = as_html


def predict_report(plan: ConversionPlan) -> ConversionReport:
    """The report of a plan that has not been carried out; no weights are needed."""
    rows = []
    params = plan.params
    for layer in plan.layers:
        row = _planned_layer(plan, layer)
        rows.append(row)
        params += row.params_after - row.params_before
    return _report(plan, params, None, rows)


def measure_report(model: nn.Module, plan: ConversionPlan) -> ConversionReport:
    """The report of a converted model, counted on the model itself.

    It is equal to `predict_report(plan)`.

    Parameters are counted tensor by tensor. MACs come from torch's flop counter in a forward pass
    on the meta device; the construction of the kernels is not counted.
    """
    params = sum(parameter.numel() for parameter in model.parameters())
    if plan.macs is None or plan.input_size is None:
        rows = [_measured_layer(model, plan, layer, macs=None) for layer in plan.layers]
        return _report(plan, params, None, rows)
    flops: Any = trace(model, plan.input_size).flops
    construction_flops = 0
    rows = []
    for layer in plan.layers:
        flops_inside = Counter[str]()
        for name in layer.names:
            flops_inside.update(flops.get(name))
        convolution_flops = flops_inside["convolution"]
        construction_flops += flops_inside.total() - convolution_flops
        rows.append(_measured_layer(model, plan, layer, macs=convolution_flops // 2))
    macs = (sum(flops[""].values()) - construction_flops) // 2
    return _report(plan, params, macs, rows)


def _measured_layer(
    model: nn.Module, plan: ConversionPlan, layer: LayerPlan, macs: int | None
) -> LayerReport:
    planned = _planned_layer(plan, layer)
    module: Any = model.get_submodule(layer.name)
    weights = module.weight.numel()
    positions = 0
    if planned.position_params:
        positions = module.positions.numel()
        if module.sigma is not None:
            positions += module.sigma.numel()
    bias = 0
    if module.bias is not None:
        bias = module.bias.numel()
    return replace(
        planned,
        params_after=weights + positions + bias,
        weight_params=weights,
        position_params=positions,
        macs_after=macs,
    )


def _report(
    plan: ConversionPlan, params: int, macs: int | None, layers: Sequence[LayerReport]
) -> ConversionReport:
    """The report of these layers.

    Args:
        params: Parameters of the whole converted model.
        macs: Its MACs; None takes those of the layers and of what is untouched, if they are known.
    """
    macs_untouched = None
    if plan.macs is not None:
        macs_untouched = plan.macs - sum(layer.macs_before or 0 for layer in layers)
        if macs is None:
            macs = macs_untouched + sum(layer.macs_after or 0 for layer in layers)
    return ConversionReport(
        model=plan.model,
        input_size=plan.input_size,
        output=None,
        params=ParamsChange(
            before=plan.params,
            after=params,
            weights=sum(layer.weight_params for layer in layers),
            positions=sum(layer.position_params for layer in layers),
        ),
        macs=MacsChange(before=plan.macs, after=macs, note=plan.macs_note),
        budget=_budget_report(plan),
        layers=tuple(layers),
        skipped=plan.skipped,
        stages_from=plan.stages_from,
        params_untouched=plan.params - sum(layer.params_before for layer in layers),
        macs_untouched=macs_untouched,
        plan=plan,
    )


def _budget_report(plan: ConversionPlan) -> BudgetReport:
    units = []
    limit = 0
    used = 0
    for unit in plan.budget:
        limit += unit.limit
        used += unit.used
        fields_of_unit = taken_from(unit, UnitReport)
        if unit.exact_count is not None:
            # Rounded down: rounded to nearest, a bound just below 35 would read 35.
            fields_of_unit["exact_count"] = int(unit.exact_count * 100) / 100
        units.append(UnitReport(**fields_of_unit))
    exact_count = units[0].exact_count if len(units) == 1 else None
    return BudgetReport(
        scope=plan.scope, limit=limit, used=used, exact_count=exact_count, units=tuple(units)
    )


def _planned_layer(plan: ConversionPlan, layer: LayerPlan) -> LayerReport:
    bias = layer.out_channels if layer.bias else 0
    positions = 0
    if plan.folded:
        weights = layer.folded_weights
    else:
        weights = layer.lines * layer.kernel_count  # so many elements on each kernel line
        if layer.tie_group is None or plan.group(layer.tie_group).layers[0] == layer.name:
            positions = layer.position_params
    from_plan = taken_from(layer, LayerReport)
    from_plan["position_params"] = positions
    return LayerReport(
        **from_plan,
        params_before=layer.dense_weights + bias,
        params_after=weights + positions + bias,
        weight_params=weights,
        macs_before=layer.macs(layer.kernel_size),
        macs_after=layer.macs(layer.dilated_size),
    )
