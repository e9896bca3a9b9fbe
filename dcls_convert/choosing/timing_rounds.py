"""Time the candidates of a sweep in rounds.

Every round times each candidate once, so that a slow minute of the machine does not affect only one
of them.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..conversion.loaded import LoadedNetwork
from .candidate import Candidate
from .results import TimingSettings
from .timing import converted_copy, forward_and_step_ms, quartiles

MIN_ROUNDS = 3  # however long they take
MAX_ROUNDS = 100


def time_in_rounds_(
    loaded: LoadedNetwork,
    candidates: Sequence[Candidate],
    settings: TimingSettings,
    device: torch.device,
) -> None:
    """Time the original and the planned candidates until the time limit of the settings.

    If an interrupt ends this, the rows have the times of all measurements so far.
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
        elapsed = time.perf_counter() - began
        is_enough = elapsed >= settings.seconds and rounds_done >= MIN_ROUNDS
        has_models = any(candidate.model is not None for candidate in candidates)
        if is_enough or not has_models:
            break
        loaded.notify(f"timing, round {rounds_done + 1}, {elapsed:.0f} of {settings.seconds:g} s")
        _time_round_(candidates, images, settings, is_warm_up=False)


def _build_models_(
    loaded: LoadedNetwork, candidates: Sequence[Candidate], network: nn.Module
) -> None:
    """Build the model of each candidate; `network` is that of the original."""
    for candidate in candidates:
        if candidate.row.reason is not None:  # an earlier step failed
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
    """Time each candidate that has a model once. Record the times in its row, except in warm-up."""
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
