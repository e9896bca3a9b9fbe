"""Passes in step give the outputs that they give alone, a call sees the inputs of all passes, and
all end if one fails.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn

from dcls_convert.errors import ModelError
from dcls_convert.networks.lockstep import run_in_lockstep


class Network(nn.Module):
    def __init__(self, *, reverses_order=False, fails=False, context=contextlib.nullcontext):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.reverses_order = reverses_order
        self.fails = fails
        self.context = context
        self.outputs = []

    def forward(self, input):
        if self.fails and len(input) == 1:
            raise MemoryError
        order = [self.first, self.second]
        if self.reverses_order and len(input) == 1:
            order.reverse()
        for conv in order:
            with self.context():
                input = conv(input)
                input = input @ input.mT
        self.outputs.append(input)


def run(model, batches, step_all):
    """Run a pass for each batch, in step."""
    passes = [functools.partial(model, batch) for batch in batches]
    run_in_lockstep([model.first, model.second], passes, step_all)


@pytest.mark.parametrize(
    "context",
    [contextlib.nullcontext, torch.inference_mode, functools.partial(torch.autocast, "cpu")],
)
def test_passes_give_the_outputs_that_they_give_alone_and_a_call_sees_the_inputs_of_all(context):
    model = Network(context=context)
    batches = [torch.randn(count, 3, 9, 9) for count in (2, 1, 3)]
    seen = []
    forward_of = {conv: conv.forward for conv in (model.first, model.second)}
    for batch in batches:
        model(batch)
    expected_outputs = model.outputs
    model.outputs = []

    def step_all(conv, inputs):
        seen.append((conv, [len(input) for input in inputs]))
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        with context():
            return [forward_of[conv](input) for input in inputs]

    run(model, batches, step_all)
    assert seen == [(model.first, [2, 1, 3]), (model.second, [2, 1, 3])]
    for output, expected in zip(model.outputs, expected_outputs, strict=True):
        assert torch.equal(output, expected)
        assert not output.requires_grad
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reverses_order": True}, ModelError),
        ({"fails": True}, MemoryError),
        ({}, KeyboardInterrupt),
    ],
)
def test_if_one_pass_fails_all_end_and_the_model_is_as_before(options, error):
    model = Network(**options)

    def step_all(conv, inputs):
        if conv is model.second:
            raise KeyboardInterrupt
        return inputs

    with pytest.raises(error):
        run(model, [torch.randn(count, 3, 9, 9) for count in (2, 1)], step_all)
    assert not any("forward" in vars(part) for part in model.modules())
