"""Time the candidates of a sweep in rounds: one after another in each, so that a slow minute of the
machine does not fall on one of them alone.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..pipeline.loaded import LoadedNetwork
from .candidate import Candidate
from .results import TimingSettings
from .timing import converted_copy, forward_and_step_ms, quartiles

MIN_ROUNDS = 3  # whatever time they take
MAX_ROUNDS = 100


def time_in_rounds_(
    loaded: LoadedNetwork,
    candidates: Sequence[Candidate],
    settings: TimingSettings,
    device: torch.device,
) -> None:
    """Time the original and the planned candidates, until the seconds of the settings are over.

    Their rows have the times of all rounds so far, also when an interrupt ends this.
    """
    assert loaded.convs.input_size is not None
    network = loaded.network.to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(settings.batch, *loaded.convs.input_size, generator=generator).to(device)
    _build_models_(loaded, candidates, network)
    began = time.perf_counter()
    loaded.notify("warming up")
    _time_round_(candidates, images, settings, is_warm_up=True)
    for rounds_done in range(MAX_ROUNDS):
        spent = time.perf_counter() - began
        is_enough = spent >= settings.seconds and rounds_done >= MIN_ROUNDS
        has_models = any(candidate.model is not None for candidate in candidates)
        if is_enough or not has_models:
            break
        loaded.notify(f"timing, round {rounds_done + 1}, {spent:.0f} of {settings.seconds:g} s")
        _time_round_(candidates, images, settings, is_warm_up=False)


def _build_models_(
    loaded: LoadedNetwork, candidates: Sequence[Candidate], network: nn.Module
) -> None:
    """Give each candidate its model to time; `network` is the original."""
    for candidate in candidates:
        if candidate.row.reason is not None:  # a step has failed
            continue
        loaded.notify(f"building {candidate.row.window}")
        with candidate.recording_failure("building"):
            if candidate.resolved is None:
                candidate.model = network
            else:
                candidate.model = converted_copy(network, candidate.resolved.plan)


def _time_round_(
    candidates: Sequence[Candidate], images: Tensor, settings: TimingSettings, *, is_warm_up: bool
) -> None:
    """Time each candidate that has a model once; put the times into its row, but for a warm-up."""
    for candidate in candidates:
        if candidate.model is None:
            continue
        with candidate.recording_failure("timing"):
            forward_ms, step_ms = forward_and_step_ms(candidate.model, images, amp=settings.amp)
            if is_warm_up:
                continue
            candidate.forward_ms.append(forward_ms)
            candidate.step_ms.append(step_ms)
            candidate.change(
                forward_ms=quartiles(candidate.forward_ms), step_ms=quartiles(candidate.step_ms)
            )
