"""Models that take turns share what is not converted, and are left as they were."""

from dataclasses import replace

import pytest
import timm
import torch

from dcls_convert import find_convs, plan_conversion
from dcls_convert.compare import timing
from dcls_convert.compare.candidates import Candidate
from dcls_convert.compare.sweep import Asked, SweepRow, TimingSettings
from dcls_convert.compare.timing import converted_twin, summary, time_
from dcls_convert.depthwise import choice as depthwise
from dcls_convert.depthwise.choice import depthwise_way
from dcls_convert.layers.dcls_conv import DclsConvNd

SETTINGS = TimingSettings(device="cpu", batch=2, seconds=0, amp=False, threads=1, torch="")


@pytest.fixture
def plan(tiny):
    return plan_conversion(find_convs(tiny, (3, 32, 32)), dilated_size=9)


def test_a_twin_shares_what_is_not_converted_and_the_model_stays(tiny, plan):
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    twin = converted_twin(tiny, plan)
    own = {id(parameter) for parameter in tiny.parameters()}
    for name, parameter in twin.named_parameters():
        layer = name.rpartition(".")[0] in {layer.name for layer in plan.layers}
        assert (id(parameter) in own) or layer or "positions" in name
    assert sum(isinstance(module, DclsConvNd) for module in twin.modules()) == len(plan.layers)
    assert not any(isinstance(module, DclsConvNd) for module in tiny.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.state_dict().items())


def candidates(plan):
    original = SweepRow(asked=None, status="original")
    return [Candidate(original), Candidate(SweepRow(asked=Asked(size=9), status="done"), plan)]


def test_training_steps_change_no_parameter(tiny, plan):
    before = {name: tensor.clone() for name, tensor in tiny.named_parameters()}
    found = candidates(plan)
    time_(found, tiny, SETTINGS, torch.device("cpu"), notify=lambda _: None)
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny.named_parameters())
    assert all(tensor.grad is None for tensor in tiny.parameters())
    assert [candidate.row.step_ms.runs for candidate in found] == [3, 3]
    assert sum(found[1].row.ways.values()) == len(plan.layers)


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
    plan = plan_conversion(find_convs(model, (3, 64, 64)), dilated_size=5)
    found = candidates(plan)
    time_(found, model, replace(SETTINGS, amp=amp), torch.device("cpu"), notify=lambda _: None)
    assert asked["sweeps"]
    assert asked["sweeps"] == asked["layers"]


def test_a_model_that_fails_says_so_and_the_others_go_on(tiny, plan, monkeypatch):
    found = candidates(plan)

    def fail(self, input):
        raise RuntimeError("no memory")

    monkeypatch.setattr(DclsConvNd, "forward", fail)
    time_(found, tiny, SETTINGS, torch.device("cpu"), notify=lambda _: None)
    assert found[0].row.step_ms.runs == 3
    assert (found[1].row.status, found[1].row.reason) == ("failed", "timing: RuntimeError: no memory")
    assert found[1].row.step_ms is None


def test_the_summary_of_runs():
    assert summary([]) is None
    assert (summary([3.0]).median, summary([3.0]).runs) == (3.0, 1)
    found = summary([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.first_quartile, found.median, found.third_quartile) == (2.0, 3.0, 4.0)
