"""Predict the report of a conversion from its plan."""

from collections.abc import Sequence

from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from ..records import shared_fields
from .report import (
    BudgetReport,
    ConversionReport,
    LayerReport,
    MacsChange,
    ParamsChange,
    UnitReport,
)


def predict_report(plan: ConversionPlan) -> ConversionReport:
    """Return the report of a plan that has not been carried out; no weights are needed."""
    rows = []
    params = plan.params
    for layer in plan.layers:
        row = predicted_layer(plan, layer)
        rows.append(row)
        params += row.params_after - row.params_before
    return assemble_report(plan, params, None, rows)


def assemble_report(
    plan: ConversionPlan, params: int, macs: int | None, layers: Sequence[LayerReport]
) -> ConversionReport:
    """Assemble the report of a conversion from the reports of its layers.

    Args:
        plan: The plan of the conversion.
        params: Number of parameters of the whole converted model.
        macs: MACs of the whole converted model. If None, the MACs of the layers and of the
            untouched rest are added up, if they are known.
        layers: The reports of all layers, in the order of the plan.
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
        fields_of_unit = shared_fields(unit, UnitReport)
        if unit.exact_count is not None:
            # Rounded down: rounded to nearest, a bound just below 35 would read 35.
            fields_of_unit["exact_count"] = int(unit.exact_count * 100) / 100
        units.append(UnitReport(**fields_of_unit))
    exact_count = units[0].exact_count if len(units) == 1 else None
    return BudgetReport(
        scope=plan.scope, limit=limit, used=used, exact_count=exact_count, units=tuple(units)
    )


def predicted_layer(plan: ConversionPlan, layer: LayerPlan) -> LayerReport:
    """Return the report of a layer, as the plan predicts it."""
    bias = layer.out_channels if layer.bias else 0
    positions = 0
    if plan.folded:
        weights = layer.folded_weights
    else:
        weights = layer.lines * layer.kernel_count  # each kernel line has this many elements
        if layer.tie_group is None or plan.group(layer.tie_group).layers[0] == layer.name:
            positions = layer.position_params
    from_plan = shared_fields(layer, LayerReport)
    from_plan["position_params"] = positions
    return LayerReport(
        **from_plan,
        params_before=layer.dense_weights + bias,
        params_after=weights + positions + bias,
        weight_params=weights,
        macs_before=layer.macs(layer.kernel_size),
        macs_after=layer.macs(layer.dilated_size),
    )
