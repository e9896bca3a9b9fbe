"""A fingerprint distinguishes models; taking one changes neither the model nor the process."""

import logging
import warnings

import pytest
import torch
from torch import nn

from dcls_convert import find_convs
from dcls_convert.checkpoints.fingerprint import (
    fingerprint_deviation,
    take_fingerprint,
)
from dcls_convert.networks.building import build_model
from dcls_convert.networks.input_tensors import image_inputs
from dcls_convert.networks.source import ModelSource

from .folders import IMAGE


def state_of_the_process():
    return (
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        logging.root.manager.disable,
        logging.root.level,
        list(warnings.filters),
    )


def test_the_process_stays_as_it_was(monkeypatch):
    """`torch.manual_seed` also seeds the devices, now or later, and their state is not restored."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("a device is seeded"))
    before = state_of_the_process()
    model = build_model(ModelSource(name="timm:test_efficientnet"), seed=3)
    find_convs(model, IMAGE)
    take_fingerprint(model, image_inputs(IMAGE))
    assert state_of_the_process() == before


class Counting(nn.Module):
    """Change one buffer in place, replace another, and draw random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = torch.ones(1)
        return x + torch.rand(())


def test_the_model_stays_as_it_was_and_its_outputs_do_not_depend_on_the_process(converted):
    """They depend neither on autocast nor on the state of the generator."""
    model, _ = converted
    model.train()
    model.stem.eval()
    model.stem.insert(0, nn.BatchNorm2d(3))
    model.stem.insert(1, Counting())
    buffers = list(model.buffers())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    first = take_fingerprint(model, image_inputs(IMAGE))
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(123)
        assert take_fingerprint(model, image_inputs(IMAGE)) == first
    assert first.outputs
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(old is new for old, new in zip(buffers, model.buffers(), strict=True))


@pytest.mark.parametrize("changed", [0, 1])
def test_every_input_reaches_the_outputs_of_a_fingerprint(changed):
    class Net(nn.Sequential):
        def forward(self, image, vector):
            return self[0](image), self[1](vector)

    net = Net(nn.Conv2d(3, 2, 1), nn.Linear(4, 2))
    inputs = (*image_inputs(IMAGE), *image_inputs((4,)))
    before = take_fingerprint(net, inputs)
    assert fingerprint_deviation(take_fingerprint(net, inputs), before) == 0
    nn.init.ones_(net[changed].weight)
    assert fingerprint_deviation(take_fingerprint(net, inputs), before) > 0.1
