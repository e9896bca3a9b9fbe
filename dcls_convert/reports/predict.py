"""Predict the report of a conversion from its plan."""

from ..errors import check_argument
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from .costs import BudgetReport, LayerReport, MacsChange, ParamsChange
from .report import ConversionReport


def predict_report(plan: ConversionPlan) -> ConversionReport:
    """Return the report of a plan that has not been carried out; no weights are needed."""
    check_argument("plan", plan, ConversionPlan)
    layers = [predicted_layer(plan, layer) for layer in plan.layers]
    params_untouched = plan.params - sum(layer.params_before for layer in layers)
    macs_untouched = None
    macs_after = None
    if plan.macs is not None:
        macs_untouched = plan.macs - sum(layer.macs_before or 0 for layer in layers)
        macs_after = macs_untouched + sum(layer.macs_after or 0 for layer in layers)
    return ConversionReport(
        model=plan.model,
        input_size=plan.input_size,
        output=None,
        params=ParamsChange(
            before=plan.params,
            after=params_untouched + sum(layer.params_after for layer in layers),
            weights=sum(layer.weight_params for layer in layers),
            positions=sum(layer.position_params for layer in layers),
        ),
        macs=MacsChange(before=plan.macs, after=macs_after, note=plan.macs_note),
        budget=_budget_report(plan),
        layers=tuple(layers),
        skipped=plan.skipped,
        stages_from=plan.stages_from,
        params_untouched=params_untouched,
        macs_untouched=macs_untouched,
        plan=plan,
    )


def _budget_report(plan: ConversionPlan) -> BudgetReport:
    budget = plan.budget
    exact_count = None
    if budget.exact_count is not None:
        # Rounded down: rounded to nearest, a bound just below 35 would read 35.
        exact_count = int(budget.exact_count * 100) / 100
    return BudgetReport(
        scope=plan.scope,
        kernel_count=budget.kernel_count,
        limit=budget.limit,
        used=budget.used,
        exact_count=exact_count,
    )


def predicted_layer(plan: ConversionPlan, layer: LayerPlan) -> LayerReport:
    """Return the report of a layer, as the plan predicts it."""
    bias = layer.out_channels if layer.bias else 0
    positions = 0
    if plan.folded:
        weights = layer.folded_weights
    else:
        weights = layer.lines * layer.kernel_count  # each kernel line has this many elements
        if plan.owner_of(layer) is layer:
            positions = layer.group_position_params
    return LayerReport(
        name=layer.name,
        stage=layer.stage,
        kind=layer.kind,
        kernel_size=layer.kernel_size,
        dilated_size=layer.dilated_size,
        kernel_count=layer.kernel_count,
        interpolation=layer.interpolation,
        tie_group=layer.tie_group,
        params_before=layer.dense_weights + bias,
        params_after=weights + positions + bias,
        weight_params=weights,
        position_params=positions,
        macs_before=layer.macs(layer.kernel_size),
        macs_after=layer.macs(layer.dilated_size),
    )
