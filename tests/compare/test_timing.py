"""Models that take turns share what is not converted, and are left as they were."""

from dataclasses import replace

import pytest
import timm
import torch

from dcls_convert import find_convs, plan_conversion
from dcls_convert.compare import timing
from dcls_convert.compare.sweep import Timing, TimingSettings
from dcls_convert.compare.timing import Timed, time_
from dcls_convert.depthwise import choice as depthwise
from dcls_convert.depthwise.choice import depthwise_way
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.progress import silent

SETTINGS = TimingSettings(device="cpu", batch=2, seconds=0, amp=False, threads=1, torch="")


@pytest.fixture
def plan(tiny):
    return plan_conversion(find_convs(tiny, (3, 32, 32)), dilated_size=9)


def test_models_share_what_is_not_converted_and_the_original_stays(tiny, plan):
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    converted = Timed.of(tiny, plan).model
    own = {id(parameter) for parameter in tiny.parameters()}
    for name, parameter in converted.named_parameters():
        layer = name.rpartition(".")[0] in {layer.name for layer in plan.layers}
        assert (id(parameter) in own) or layer or "positions" in name
    assert sum(isinstance(module, DclsConvNd) for module in converted.modules()) == len(plan.layers)
    assert not any(isinstance(module, DclsConvNd) for module in tiny.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())


def measured(model, plan, settings=SETTINGS):
    both = [Timed.of(model, None), Timed.of(model, plan)]
    time_(both, plan.input_size, settings, torch.device("cpu"), notify=silent)
    return both


def test_training_steps_change_no_parameter(tiny, plan):
    before = {name: tensor.clone() for name, tensor in tiny.named_parameters()}
    both = measured(tiny, plan)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.named_parameters())
    assert all(tensor.grad is None for tensor in tiny.parameters())
    assert [one.step_ms.runs for one in both] == [3, 3]
    assert both[1].ways.total() == len(plan.layers)


@pytest.mark.parametrize("amp", [False, True])
def test_the_ways_named_are_those_that_the_convolutions_ask_for(monkeypatch, amp):
    asked = {"layers": set(), "sweeps": set()}

    def spy(of):
        def way(device, dtype, channels_last, input_size, *geometry, **seen):
            asked[of].add(
                (device, dtype, channels_last, *(tuple(x) for x in (input_size, *geometry[:-1])), geometry[-1])
            )
            return depthwise_way(device, dtype, channels_last, input_size, *geometry, **seen)

        return way

    monkeypatch.setattr(depthwise, "depthwise_way", spy("layers"))
    monkeypatch.setattr(timing, "depthwise_way", spy("sweeps"))
    model = timm.create_model("test_efficientnet").eval()
    measured(model, plan_conversion(find_convs(model, (3, 64, 64)), dilated_size=5), replace(SETTINGS, amp=amp))
    assert asked["sweeps"]
    assert asked["sweeps"] == asked["layers"]


def test_a_model_that_fails_says_so_and_the_others_go_on(tiny, plan, monkeypatch):
    def fail(self, input):
        raise RuntimeError("no memory")

    monkeypatch.setattr(DclsConvNd, "forward", fail)
    original, converted = measured(tiny, plan)
    assert original.step_ms.runs == 3
    assert (str(converted.error), converted.step_ms) == ("no memory", None)


def test_times_are_medians_and_quartiles(tiny):
    assert Timed(tiny).forward_ms is None
    assert Timed(tiny, forward=[3.0]).forward_ms == Timing(median=3.0, first_quartile=3.0, third_quartile=3.0, runs=1)
    times = Timed(tiny, step=[1.0, 2.0, 3.0, 4.0, 5.0]).step_ms
    assert (times.first_quartile, times.median, times.third_quartile) == (2.0, 3.0, 4.0)
