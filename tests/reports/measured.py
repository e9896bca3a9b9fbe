"""The JSON report of a converted model, counted on the model itself."""

from collections import Counter

import torch
from torch.utils.flop_counter import FlopCounterMode

from dcls_convert.reports.report import predict_report
from dcls_convert.running.run import running


def measure_report(model, plan):
    """Count parameters tensor by tensor, and MACs by torch's counter, without construction."""
    report = predict_report(plan).to_dict()
    set_after(report["params"], sum(parameter.numel() for parameter in model.parameters()))
    for layer, row in zip(plan.layers, report["layers"], strict=True):
        row |= measured_params(model.get_submodule(layer.name), layer)
    for kind in ("weight", "position"):
        report["params"][f"{kind}s"] = sum(row[f"{kind}_params"] for row in report["layers"])
    if plan.macs is None:
        return report
    flops = count_flops(model, plan.input_size)
    total = sum(flops["Global"].values())
    for layer, row in zip(plan.layers, report["layers"], strict=True):
        inside = Counter()
        for name in layer.names:  # the counter knows one of them
            inside.update(flops.get(f"{type(model).__name__}.{name}"))
        convolution = inside[torch.ops.aten.convolution]
        row["macs_after"] = convolution // 2
        total -= inside.total() - convolution
    set_after(report["macs"], total // 2)
    return report


def set_after(change, count):
    change["after"] = count
    change["delta"] = count - change["before"]


def count_flops(model, input_size):
    image = torch.empty(1, *input_size, dtype=next(model.parameters()).dtype, device="meta")
    with running(model, on_meta=True) as run, FlopCounterMode(display=False) as counter:
        run(image)
    return counter.get_flop_counts()


def measured_params(module, layer):
    positions = 0
    if layer.position_params:
        positions = module.positions.numel()
        if module.sigma is not None:
            positions += module.sigma.numel()
    bias = 0 if module.bias is None else module.bias.numel()
    return {
        "params_after": module.weight.numel() + positions + bias,
        "weight_params": module.weight.numel(),
        "position_params": positions,
    }
