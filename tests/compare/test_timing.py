"""Models that are timed share what is not converted, and are left as they were."""

import timm
import torch

from dcls_convert import find_convs, plan_conversion
from dcls_convert.compare import timing
from dcls_convert.compare.sweep import Timing, TimingSettings
from dcls_convert.compare.timing import Clock, converted_copy, summary
from dcls_convert.depthwise import choice as depthwise
from dcls_convert.depthwise.choice import depthwise_way
from dcls_convert.layers.dcls_conv import DclsConvNd


def converted_and_clock(model, size, *, amp=False):
    plan = plan_conversion(find_convs(model, size), dilated_size=5)
    settings = TimingSettings(device="cpu", batch=2, seconds=0, amp=amp, threads=1, torch="")
    return converted_copy(model, plan), Clock(size, settings, torch.device("cpu")), plan


def test_models_share_what_is_not_converted_and_no_parameter_changes():
    model = timm.create_model("test_efficientnet").eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    converted, clock, plan = converted_and_clock(model, (3, 32, 32))
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in converted.named_parameters():
        layer = name.rpartition(".")[0] in {layer.name for layer in plan.layers}
        assert (id(parameter) in own) or layer or "positions" in name
    assert sum(isinstance(module, DclsConvNd) for module in converted.modules()) == len(plan.layers)
    assert clock.ways(converted).total() == len(plan.layers)
    assert clock.ways(model).total() == 0
    for each in (model, converted):
        state = {name: tensor.clone() for name, tensor in each.named_parameters()}
        assert min(clock.measure(each)) > 0
        assert all(torch.equal(state[name], tensor) for name, tensor in each.named_parameters())
        assert all(tensor.grad is None for tensor in each.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert not any(isinstance(module, DclsConvNd) for module in model.modules())


def test_the_ways_named_are_those_that_the_convolutions_ask_for(monkeypatch):
    asked = {"layers": set(), "sweeps": set()}

    def spy(of):
        def way(device, dtype, channels_last, input_size, *geometry, **seen):
            sizes = (tuple(part) for part in (input_size, *geometry[:-1]))
            asked[of].add((device, dtype, channels_last, *sizes, geometry[-1]))
            return depthwise_way(device, dtype, channels_last, input_size, *geometry, **seen)

        return way

    monkeypatch.setattr(depthwise, "depthwise_way", spy("layers"))
    monkeypatch.setattr(timing, "depthwise_way", spy("sweeps"))
    model = timm.create_model("test_efficientnet").eval()
    for amp in (False, True):
        converted, clock, _ = converted_and_clock(model, (3, 32, 32), amp=amp)
        clock.ways(converted)
        clock.measure(converted)
    assert asked["sweeps"] == asked["layers"]
    assert {dtype for _, dtype, *_ in asked["sweeps"]} == {torch.float32, torch.bfloat16}


def test_times_are_medians_and_quartiles():
    assert summary([3.0]) == Timing(median=3.0, first_quartile=3.0, third_quartile=3.0, runs=1)
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(median=3.0, first_quartile=2.0, third_quartile=4.0, runs=5)
