"""Setup of all tests: no hub, one thread, the profiles of hypothesis, and shared fixtures."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before timm is imported: no test reaches a hub
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported

import pytest
import timm
import torch
from huggingface_hub import constants
from hypothesis import HealthCheck, settings
from torch import nn

from .image_folder import write_images

TINY = "test_convnext"  # timm's own test model: depths 1, 2, 4, 2

# The tensors are small, and on a busy machine two threads wait for one another.
torch.set_num_threads(1)
# accelerate collects garbage for each network; frozen, the imported modules are not scanned.
gc.freeze()


# HYPOTHESIS_PROFILE=campaign searches longer, with a new seed each time; the plain tests use the
# same few examples.
_HYPOTHESIS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("plain", max_examples=20, derandomize=True, **_HYPOTHESIS)
settings.register_profile("campaign", max_examples=2000, print_blob=True, **_HYPOTHESIS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "plain"))
# For tests of plain values, which take milliseconds: more examples, the same in each run.
many_examples = settings(max_examples=max(100, settings.default.max_examples))


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that extensions see their objects released


@pytest.fixture
def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return timm.create_model(TINY).eval()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Make an empty folder the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def images_here(empty_folder):
    """Write images of two classes into `images` in the working folder."""
    write_images(empty_folder / "images")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Give the hub's client an empty cache, and return its folder. Nothing asks a hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
