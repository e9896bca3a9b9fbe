"""The one way to a sweep: plan all combinations, fit those with weights, time all by turns, mark and choose."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..progress import Notify
from .candidates import Candidate, Planner, fit_, with_images_read
from .sweep import Asked, Sweep, TimingSettings, choose, with_dominated
from .timing import time_


def make_sweep(
    planner: Planner,
    combinations: Sequence[Asked],
    build: Callable[[], nn.Module],
    *,
    model: str,
    timing: tuple[TimingSettings, torch.device] | None,
    slower: float,
    note: Notify,
    notify: Notify,
) -> Sweep:
    """All rows, the dense original first. KeyboardInterrupt ends it early, with what is known by then.

    Args:
        build: The network with its weights; called once, where something is fitted or timed.
        model: What the sweep calls it.
        timing, slower: How to measure times, and percent, for `choose`.
        note: Told what a user should know.
        notify: Told about progress.

    Raises:
        DclsConvertError: No combination can be planned, or the network cannot be built.
    """
    candidates = [Candidate(planner.original())]
    interrupted = False
    try:
        for number, asked in enumerate(combinations, 1):
            notify(f"planning {number} of {len(combinations)}")
            candidates.append(planner.candidate(asked))
        planned = [candidate for candidate in candidates if candidate.plan]
        fitted = planned if planner.start.trained else []
        network = build() if fitted or (timing and planned) else None
        start = planner.start
        for number, candidate in enumerate(fitted, 1):
            assert network is not None
            notify(f"fitting {candidate.row.window}, {number} of {len(fitted)}")
            start = with_images_read(start, network, candidate, note=note)
            fit_(candidate, network, start, note=note, notify=notify)
        if timing is not None and network is not None:
            time_(candidates, network, *timing, notify=notify)
    except KeyboardInterrupt:
        interrupted = True
    rows = with_dominated([candidate.row for candidate in candidates])
    return Sweep(
        model=model,
        input_size=planner.convs.input_size,
        macs_note=planner.convs.macs_note,
        rows=rows,
        timing=timing[0] if timing else None,
        slower=slower,
        interrupted=interrupted,
        choice=choose(rows, slower),
    )
