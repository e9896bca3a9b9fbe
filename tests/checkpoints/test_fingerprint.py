"""A fingerprint tells models apart; taking one leaves the model and the process as they were."""

import logging
import warnings

import pytest
import torch
from torch import nn

from dcls_convert import find_convs
from dcls_convert.checkpoints.fingerprint import Fingerprint, take_fingerprint
from dcls_convert.networks.building import build_model
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


@pytest.mark.parametrize("call", ["build", "meta", "find", "fingerprint"])
def test_the_process_stays_as_it_was(monkeypatch, call):
    """`torch.manual_seed` also seeds the devices, at once or later, and nobody puts those back."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("a device is seeded"))
    source = ModelSource(name="timm:test_efficientnet")
    model = build_model(source)
    before = state_of_the_process()
    {
        "build": lambda: build_model(source, seed=3),
        "meta": lambda: build_model(source, device="meta"),
        "find": lambda: find_convs(model, IMAGE),
        "fingerprint": lambda: take_fingerprint(model, IMAGE),
    }[call]()
    assert state_of_the_process() == before


class Counting(nn.Module):
    """Counts its calls, also by another tensor in a buffer's place, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = torch.ones(1)
        return x + torch.rand(())


def test_the_model_stays_as_it_was_and_its_outputs_do_not_depend_on_the_process(converted):
    """Neither on autocast nor on the state of the generator."""
    model, _ = converted
    model.train()
    model.stem.eval()
    model.stem.insert(0, nn.BatchNorm2d(3))
    model.stem.insert(1, Counting())
    buffers = list(model.buffers())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    first = take_fingerprint(model, IMAGE)
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(123)
        assert take_fingerprint(model, IMAGE) == first
    assert first.outputs
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(one is other for one, other in zip(buffers, model.buffers(), strict=True))


def test_outputs_of_all_kinds():
    class Many(nn.Module):
        def forward(self, x):
            return {
                "a": (x.mean(), [x[:, :1]]),
                "empty": x[:0],
                "nan": x.new_tensor([float("nan"), 1.0]),
                "n": x.int(),
            }

    taken = take_fingerprint(Many(), (3, 5, 5))
    assert [output.shape for output in taken.outputs] == [(), (1, 1, 5, 5), (0, 3, 5, 5), (2,)]
    assert [len(output.values) for output in taken.outputs] == [1, 16, 0, 2]
    assert (taken.outputs[3].norm, taken.outputs[3].values) == (None, (None, 1.0))
    flat = torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))[0, 0].flatten()
    numbers = (taken.outputs[1].norm, taken.outputs[1].values[0], taken.outputs[1].values[-1])
    assert numbers == pytest.approx((flat.norm().item(), flat[0].item(), flat[-1].item()), rel=1e-5)
    assert Fingerprint.from_json(taken.to_json(), "it") == taken


def test_a_model_that_cannot_run_says_why():
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    assert take_fingerprint(Two(), None).reason == "the plan has no input size"
    assert take_fingerprint(Two(), IMAGE).reason.startswith("TypeError: ")
