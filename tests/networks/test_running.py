"""Running a user's network leaves the settings of the process as they were."""

import sys
import threading
import time
import warnings
from operator import attrgetter

import pytest
import torch
from torch import nn

from dcls_convert.networks.running import (
    CPU_FP32_BACKENDS,
    CUDA_FP32_BACKENDS,
    full_precision,
    run_batch,
    seeded,
    suppress_output,
)

from ..model_state import state_of

BACKENDS = torch.backends
NEWER = hasattr(BACKENDS.cuda.matmul, "fp32_precision")  # torch 2.9
PARTS = (*CPU_FP32_BACKENDS, *CUDA_FP32_BACKENDS, "cudnn") if NEWER else ()
newer = pytest.mark.skipif(not NEWER, reason="an interface of torch 2.9")


def precisions():
    """All settings for products of float32; None for those that torch refuses to read."""

    def read_or_none(read):
        try:
            return read()
        except RuntimeError:
            return None

    older = [
        read_or_none(torch.get_float32_matmul_precision),
        read_or_none(lambda: BACKENDS.cuda.matmul.allow_tf32),
        read_or_none(lambda: BACKENDS.cudnn.allow_tf32),
    ]
    return older, [attrgetter(part)(BACKENDS).fp32_precision for part in PARTS]


@pytest.fixture
def _restored_precisions():
    (precision, _, in_cudnn), before = precisions()
    yield
    if NEWER:
        BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision(precision)
    BACKENDS.cudnn.allow_tf32 = in_cudnn
    for part, value in zip(PARTS, before, strict=True):
        attrgetter(part)(BACKENDS).fp32_precision = value
    assert precisions() == ([precision, False, in_cudnn], before)


@pytest.mark.usefixtures("_restored_precisions")
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (None, None),
        ("cuda.matmul.allow_tf32", True),
        ("cudnn.allow_tf32", False),
        pytest.param("fp32_precision", "tf32", marks=newer),
        pytest.param("cudnn.fp32_precision", "tf32", marks=newer),
        pytest.param("cudnn.conv.fp32_precision", "tf32", marks=newer),
        ("float32_matmul_precision", "medium"),
    ],
)
def test_float32_is_not_rounded_inside_even_if_the_process_allows_it(place, value):
    if place == "float32_matmul_precision":
        torch.set_float32_matmul_precision(value)
    elif place is not None:
        path, _, name = f".{place}".rpartition(".")
        setattr(attrgetter(path[1:])(BACKENDS) if path else BACKENDS, name, value)
    before = precisions()
    with full_precision():
        older, parts = precisions()
        assert older[0] in ("highest", None)
        assert not any(older[1:])
        assert not {"tf32", "bf16"} & set(parts[: len(CPU_FP32_BACKENDS) + len(CUDA_FP32_BACKENDS)])
    assert precisions() == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_off_inside_and_on_again_afterwards(device):
    torch.set_autocast_enabled(device, True)
    try:
        with full_precision():
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)


def settings():
    return (precisions(), sys.stdout, sys.stderr, list(warnings.filters))


@pytest.mark.parametrize("change", [full_precision, suppress_output])
def test_threads_that_overlap_leave_the_settings_as_they_were(change):
    before = settings()
    first = change()
    second = change()
    first.__enter__()
    inside = settings()
    assert inside != before
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings() == inside
    second.__exit__(None, None, None)
    assert settings() == before


def test_threads_that_seed_at_the_same_time_leave_the_random_state_as_it_was():
    before = torch.get_rng_state()
    second_begins = threading.Event()
    first_is_done = threading.Event()

    def seed_meanwhile():
        second_begins.set()
        with seeded(1):
            first_is_done.wait(10)

    thread = threading.Thread(target=seed_meanwhile)
    with seeded(0):
        thread.start()
        second_begins.wait(10)
        time.sleep(0.05)  # without a lock, the thread would seed now
    first_is_done.set()
    thread.join(20)
    assert torch.equal(torch.get_rng_state(), before)


class Streaming(nn.Module):
    """Changes its buffers in place, replaces them and sets them for the first time; one has two
    names. Keeps what it computes, and how often, in attributes of several kinds.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(1))
        self.norm.register_buffer("calls", self.calls)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("last", None)
        self.mean = torch.zeros(())  # no buffer
        self.history = [0]
        self.cache = {"a": 1}

    def forward(self, x):
        self.calls += 1
        self.mean.add_(1)
        self.history.append(x)
        self.cache[len(self.cache)] = x
        self.newest = x
        self.largest = torch.maximum(self.largest, x.max())
        previous = 0 if self.last is None else self.last
        self.last = self.norm(self.conv(x))
        return self.last + previous + self.norm.calls + self.mean


@pytest.mark.parametrize("training", [False, True])
def test_what_forward_changes_in_the_network_stays_as_it_was(training):
    model = Streaming().train(training)
    image = torch.randn(2, 3, 9, 9)
    before = (state_of(model), model.mean.item(), list(model.history), dict(model.cache))
    history = model.history
    first = run_batch(model, image)
    torch.testing.assert_close(run_batch(model, image), first, rtol=0, atol=0)
    assert model.history is history
    assert (state_of(model), model.mean.item(), model.history, model.cache) == before
    torch.testing.assert_close(first, model(image), rtol=0, atol=0)
