"""The JSON report of a converted model, counted on the model itself."""

from collections import Counter

import torch
from torch.utils.flop_counter import FlopCounterMode

from dcls_convert.networks.running import eval_mode, without_values
from dcls_convert.reports.report import predict_report


def measure_report(model, plan):
    """Count parameters tensor by tensor, and MACs by torch's counter, without construction."""
    flops = None if plan.macs is None else count_flops(model, plan.input_size)
    report = predict_report(plan).to_dict()
    for layer, row in zip(plan.layers, report["layers"], strict=True):
        row |= measured_layer(model, layer, flops)
    set_after(report["params"], sum(parameter.numel() for parameter in model.parameters()))
    for kind in ("weight", "position"):
        total = sum(row[f"{kind}_params"] for row in report["layers"])
        report["params"][f"{kind}s"] = total
    if flops is not None:
        construction = sum(construction_flops(model, layer, flops) for layer in plan.layers)
        set_after(report["macs"], (sum(flops["Global"].values()) - construction) // 2)
    return report


def set_after(change, count):
    change["after"] = count
    change["delta"] = count - change["before"]


def count_flops(model, input_size):
    image = torch.empty(1, *input_size, dtype=next(model.parameters()).dtype, device="meta")
    with eval_mode(model), without_values(model), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_flop_counts()


def flops_inside(model, layer, flops):
    """Return the operations of a layer, by operator; the counter names one of its names."""
    inside = Counter()
    for name in layer.names:
        inside.update(flops.get(f"{type(model).__name__}.{name}"))
    return inside


def construction_flops(model, layer, flops):
    inside = flops_inside(model, layer, flops)
    return inside.total() - inside[torch.ops.aten.convolution]


def measured_layer(model, layer, flops):
    module = model.get_submodule(layer.name)
    positions = 0
    if layer.position_params:
        positions = module.positions.numel()
        if module.sigma is not None:
            positions += module.sigma.numel()
    bias = 0 if module.bias is None else module.bias.numel()
    macs = None
    if flops is not None:
        macs = flops_inside(model, layer, flops)[torch.ops.aten.convolution] // 2
    return {
        "params_after": module.weight.numel() + positions + bias,
        "weight_params": module.weight.numel(),
        "position_params": positions,
        "macs_after": macs,
    }
