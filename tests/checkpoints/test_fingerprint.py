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
from dcls_convert.networks.source import ModelSource
from dcls_convert.running.input_spec import image_inputs

from ..model_state import state_of
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


class AddNoise(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


def test_outputs_depend_neither_on_autocast_nor_on_the_generator(converted):
    model, _ = converted
    model.train().stem.insert(0, nn.BatchNorm2d(3))
    model.stem.insert(1, AddNoise())
    before = state_of(model)
    first = take_fingerprint(model, image_inputs(IMAGE))
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(123)
        assert take_fingerprint(model, image_inputs(IMAGE)) == first
    assert first.outputs
    assert state_of(model) == before


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
