"""Passes in step see each other's inputs, give what passes alone give, and end where one of them
fails.
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
        self.one, self.other = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.reverses_order = reverses_order
        self.fails = fails
        self.context = context
        self.found = []

    def forward(self, input):
        if self.fails and len(input) == 1:
            raise MemoryError
        order = [self.one, self.other]
        if self.reverses_order and len(input) == 1:
            order.reverse()
        for conv in order:
            with self.context():
                input = conv(input)
                input = input @ input.mT
        self.found.append(input)


def run(model, batches, step_all):
    """The inputs that the convolutions saw."""
    run_in_lockstep(
        [model.one, model.other], [functools.partial(model, batch) for batch in batches], step_all
    )


@pytest.mark.parametrize(
    "context",
    [contextlib.nullcontext, torch.inference_mode, functools.partial(torch.autocast, "cpu")],
)
def test_passes_give_what_they_give_alone_and_a_call_sees_the_inputs_of_all(context):
    model = Network(context=context)
    batches = [torch.randn(count, 3, 9, 9) for count in (2, 1, 3)]
    seen = []
    old = {conv: conv.forward for conv in (model.one, model.other)}
    for batch in batches:
        model(batch)
    expected = model.found
    model.found = []

    def step_all(conv, inputs):
        seen.append((conv, [len(input) for input in inputs]))
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        with context():
            return [old[conv](input) for input in inputs]

    run(model, batches, step_all)
    assert seen == [(model.one, [2, 1, 3]), (model.other, [2, 1, 3])]
    for one, other in zip(model.found, expected, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reverses_order": True}, ModelError),
        ({"fails": True}, MemoryError),
        ({}, KeyboardInterrupt),
    ],
)
def test_where_one_fails_all_end_and_the_model_is_as_before(options, error):
    model = Network(**options)

    def step_all(conv, inputs):
        if conv is model.other:
            raise KeyboardInterrupt
        return inputs

    with pytest.raises(error):
        run(model, [torch.randn(count, 3, 9, 9) for count in (2, 1)], step_all)
    assert not any("forward" in vars(part) for part in model.modules())
