"""The one way to a sweep: plan all combinations, fit those with weights, time all by turns, mark and choose."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from .candidates import Candidate, Planner, Say, fit_, with_images_read
from .rows import Asked, Sweep, TimingSettings, choose, with_dominated
from .timing import time_


def make_sweep(
    planner: Planner,
    combinations: Iterable[Asked],
    build: Callable[[], nn.Module],
    *,
    model: str,
    timing: tuple[TimingSettings, torch.device] | None,
    slower: float,
    note: Say,
    step: Say,
) -> Sweep:
    """All rows, the dense original first. KeyboardInterrupt ends it early, with what is known by then.

    Args:
        build: The network with its weights; called where something is fitted or timed.
        model: What the sweep calls it.
        timing, slower: How to measure times, and percent, for `choose`.
        note: Told what a user should know.
        step: Told about progress.

    Raises:
        DclsConvertError: No combination can be planned, or the network cannot be built.
    """
    candidates = [Candidate(planner.original())]
    interrupted = False
    try:
        for asked in combinations:
            candidates.append(planner.candidate(asked))
            step(f"planned {candidates[-1].row.window}")
        planned = [candidate for candidate in candidates if candidate.plan]
        if planner.start.trained and planned:
            network = build()
            start = with_images_read(planner.start, network, planned[0], note=note)
            for number, candidate in enumerate(planned, 1):
                step(f"fitting {candidate.row.window}, {number} of {len(planned)}")
                fit_(candidate, network, start, note=note, step=step)
        if timing is not None and planned:
            time_(candidates, build(), *timing, step=step)
    except KeyboardInterrupt:
        interrupted = True
    rows = with_dominated([candidate.row for candidate in candidates])
    return Sweep(
        model=model,
        input_size=planner.convs.input_size,
        rows=rows,
        timing=timing[0] if timing else None,
        interrupted=interrupted,
        choice=choose(rows, slower),
    )
