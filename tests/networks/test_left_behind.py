"""However a measurement ends, and whatever forward does, nothing of it is left behind."""

import contextlib
import random
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcls_convert import find_convs

from ..model_state import state_of

INPUT = (2, 16)


def pre_hook(module, args):
    """Do nothing: a hook that must stay."""


class Network(nn.Module):
    """Looks back alone, so both parts of the measurement run it.

    Its layer scale is so small that the second part gives it other values.
    """

    def __init__(self, use):
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.full((2, 1), 1e-6))
        self.used = nn.Conv1d(2, 2, 3, padding=1)  # its search has several steps
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.seen = []
        self.use = use
        self.norm.eval()
        self.conv.requires_grad_(False)
        self.conv.register_forward_pre_hook(pre_hook)

    def forward(self, x):
        self.use(self)
        x = self.used(F.pad(x, (1, -1))) * self.used.weight.shape[-1]
        return x + self.scale * self.norm(self.conv(F.pad(x, (1, -1))))


def everything(model):
    """All that could change in a network and in the process, in its order."""
    process = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],
        list(warnings.filters),
        sys.stdout,
        sys.stderr,
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
    ]
    return [list(state_of(model).items()), model.calls, list(model.seen), process]


ENDINGS = {
    "success": None,
    "an error": ValueError("no such input"),
    "Ctrl-C": KeyboardInterrupt(),
    "out of memory": torch.OutOfMemoryError("out of memory"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_at_any_call_of_forward_leaves_nothing_behind(ending):
    error = ENDINGS[ending]
    calls = 0
    last = 0  # the call that ends

    def end(model):
        nonlocal calls
        calls += 1
        if calls == last and error is not None:
            raise error

    def measure(model):
        """Run both parts of the measurement."""
        convs = find_convs(model, INPUT)
        return convs, convs.dependence and convs.dependence.broken_by({"conv": (7,)})

    model = Network(end)
    before = everything(model)
    convs, broken = measure(model)
    assert [skip.name for skip in convs.skipped] == ["used"]
    assert list(broken) == ["conv"]
    assert everything(model) == before
    for last in range(1, calls + 1):
        calls = 0
        with contextlib.suppress(BaseException):
            measure(model)
        assert calls >= last
        assert everything(model) == before, f"call {last}"


def attributes(model):
    model.count += 1
    model.calls += 1
    model.seen.append(model.calls)
    model.late = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.ones(1))
    model.linear.register_forward_hook(lambda *args: None)
    model.linear.eval()
    model.norm.train()


def other_parameters(model):
    model.linear.weight.data.mul_(0.5)
    model.linear.requires_grad_(False)
    # As quantisers keep it; new weights may have values that are not finite.
    model.scale.data.copy_(model.conv.weight.abs().max())


def convolutions(model):
    model.conv.weight.data.mul_(0.5)
    model.conv.bias.data.add_(1)
    model.used.weight = nn.Parameter(model.used.weight * 2)


def random_numbers(model):
    return torch.rand(1), random.random(), np.random.rand()


@pytest.mark.parametrize("change", [attributes, other_parameters, convolutions, random_numbers])
def test_what_forward_changes_is_undone(change):
    model = Network(change)
    before = everything(model)
    find_convs(model, INPUT)
    assert everything(model) == before
