"""Models shared by the tests: small, seeded, in eval mode."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # before timm is imported: no test reaches a hub

import pytest
import timm
import torch
from torch import nn

TINY = "test_convnext"  # timm's own test model: depths 1, 2, 4, 2

torch.set_num_threads(1)  # the tensors are small, and on a busy machine two threads wait for one another


def pytest_addoption(parser):
    parser.addoption("--seconds", type=float, default=20.0, help="of each campaign (pytest -m campaign)")
    parser.addoption("--seed", type=int, default=0, help="of the campaigns' inputs")


@pytest.fixture
def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(TINY).eval()


@pytest.fixture(autouse=True)
def _signals_as_they_were():
    """The command line sets handlers for the rest of its process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
