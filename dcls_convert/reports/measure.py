"""Measure the report of a converted model, on the model itself."""

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from ..networks.tracing import trace
from ..planning.layer_plan import LayerPlan
from ..planning.plan import ConversionPlan
from .predict import assemble_report, predicted_layer
from .report import ConversionReport, LayerReport


def measure_report(model: nn.Module, plan: ConversionPlan) -> ConversionReport:
    """Return the report of a converted model, counted on the model itself.

    It equals `predict_report(plan)` if the model was converted as planned.

    Parameters are counted tensor by tensor. MACs come from torch's FLOP counter in a forward pass
    on the meta device, without the construction of the kernels.
    """
    params = sum(parameter.numel() for parameter in model.parameters())
    if plan.macs is None or plan.input_size is None:
        rows = [_measured_layer(model, plan, layer, macs=None) for layer in plan.layers]
        return assemble_report(plan, params, None, rows)
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
    return assemble_report(plan, params, macs, rows)


def _measured_layer(
    model: nn.Module, plan: ConversionPlan, layer: LayerPlan, macs: int | None
) -> LayerReport:
    planned = predicted_layer(plan, layer)
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
