"""Train small spiking networks to tell offsets in time, with learnt, random and no delays.

    python benchmarks/delays.py [--seeds N] [--steps N] [--table]

Two inputs spike once each. The second comes 0, 3, 6, ... or 21 steps after the first, and the class
is this offset, one of 8; the time of the first spike is random. One layer of leaky
integrate-and-fire units takes both, and classes are read from the number of spikes of each unit. A
unit hardly remembers more than three steps (half of its potential is left after a step), so it can
tell an offset only if its connections delay the first input by about as much. This is a toy version
of arXiv:2306.17670.

Connections with delays are a convolution of one cell, converted to one element in a window of 25
steps that looks back, with positions from a uniform start. The networks:

- Gaussian: sigmas shrink over the first quarter of the training (`shrink_sigma_`). After half of
  it, positions are rounded (`round_positions_`), and only weights are trained from then on.
- narrow Gaussian: the same, but in the second quarter sigmas shrink further, from 0.5 to 0.3 steps.
- bilinear: positions are rounded at the same time.
- random: positions are rounded before the training. Five more units make up for the positions that
  are not trained.
- none: not converted, with as many units as that.

All start from the same distribution of weights.

Choices made by looking at results, on seeds from 100 on: the numbers of classes and units, the
learning rates, and the time of rounding. 24 units were taken because 16 did not always learn all
classes; with 16, random delays were worse. Rounded at the end, networks that were right on 88 to
100 % fell to as little as 12 %, and a quarter of the training did not always make up for it.

Each seed has its own weights, delays and series. Results go to benchmarks/results/delays.jsonl.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring import markdown_table, run_trainings

if TYPE_CHECKING:  # --table does not need torch
    import torch
    from series import Data
    from torch import nn

CLASSES = 8
OFFSET = 3  # steps between the offsets of neighbouring classes
FIRST_SPIKES = 10  # the first spike is at one of so many steps
LENGTH = 60  # steps of a series
KEEP = 0.5  # share of a potential that is left after a step
WINDOW = 25  # steps
BATCH = 128  # series
TEST_SERIES = 2000
LR = 1e-2
POSITION_LR_SCALE = 50.0
SHRINKING = 0.25  # share of the training in which sigmas shrink
SIGMA = 0.5  # steps, after that
ROUNDING = 0.5  # share of the training after which positions are rounded


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train a network."""

    name: str
    units: int
    interpolation: str | None = None  # None without delays
    learnt: bool = False
    last_sigma: float = SIGMA  # steps, before positions are rounded


ARMS = (
    Arm(name="learnt delays, Gaussian", units=24, interpolation="gaussian", learnt=True),
    Arm(
        name="learnt delays, narrow Gaussian",
        units=24,
        interpolation="gaussian",
        learnt=True,
        last_sigma=0.3,
    ),
    Arm(name="learnt delays, bilinear", units=24, interpolation="bilinear", learnt=True),
    Arm(name="random delays", units=29, interpolation="bilinear"),
    Arm(name="no delays", units=29),
)


def make_series(count: int, generator: "torch.Generator") -> "Data":
    """Return spikes (N, 2, LENGTH) and the classes of their offsets (N,)."""
    import torch

    classes = torch.randint(CLASSES, (count,), generator=generator)
    first = torch.randint(FIRST_SPIKES, (count,), generator=generator)
    spikes = torch.zeros(count, 2, LENGTH)
    series = torch.arange(count)
    spikes[series, 0, first] = 1
    spikes[series, 1, first + OFFSET * classes] = 1
    return spikes, classes


def batches(generator: "torch.Generator") -> "Iterator[Data]":
    while True:
        yield make_series(BATCH, generator)


def make_network(arm: Arm, seed: int) -> "nn.Module":
    import torch
    from series import SpikingNetwork

    import dcls_convert

    torch.manual_seed(seed)
    network = SpikingNetwork(inputs=2, units=arm.units, classes=CLASSES, keep=KEEP)
    if arm.interpolation is None:
        return network
    weight = network.hidden.weight.detach()
    rule = {
        "match": {"path": "hidden"},
        "grow": "back",
        "dilated_size": WINDOW,
        "kernel_count": 1,
        "interpolation": arm.interpolation,
    }
    dcls_convert.convert_(
        network,
        rules={"format": 1, "rules": [rule]},
        init="random",
        positions="uniform",
        tie="none",
        seed=seed,
        input_size=(2, LENGTH),
    )
    with torch.no_grad():
        network.hidden.weight.copy_(weight)  # random elements would hardly cause a spike
    return network


def measure(arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Train one network; return its row."""
    import torch
    from series import accuracy, train_, trained_parameters

    from dcls_convert.tuning import round_positions_, shrink_sigma_

    generator = torch.Generator().manual_seed(seed)
    test = make_series(TEST_SERIES, generator)
    network = make_network(arm, seed)
    row: dict[str, Any] = {"network": arm.name, "seed": seed, "units": arm.units}
    rounding = int(ROUNDING * steps)

    def before_step(step: int) -> None:
        if arm.learnt and step == rounding:
            row["before_rounding"] = accuracy(network, test)
            round_positions_(network)
            row["after_rounding"] = accuracy(network, test)
        elif arm.interpolation == "gaussian" and step < rounding:
            progress = step / (SHRINKING * steps)
            narrowing = max(0.0, progress - 1) * (SIGMA - arm.last_sigma)
            shrink_sigma_(network, progress, last=SIGMA - narrowing)

    if arm.interpolation == "gaussian":
        shrink_sigma_(network, 0)  # sigmas are not trained
    elif arm.interpolation is not None and not arm.learnt:
        round_positions_(network)
    row["trained_parameters"] = trained_parameters(network)
    row["seconds"] = train_(
        network,
        batches(generator),
        steps=steps,
        lr=LR,
        position_lr_scale=POSITION_LR_SCALE,
        before_step=before_step,
    )
    row["accuracy"] = accuracy(network, test)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a line for each network."""
    members: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        members.setdefault(row["network"], []).append(row)
    lines = []
    for name, runs in members.items():
        lines.append(
            [
                name,
                str(runs[0]["units"]),
                str(runs[0]["trained_parameters"]),
                mean_and_range(runs, "before_rounding"),
                mean_and_range(runs, "after_rounding"),
                mean_and_range(runs, "accuracy"),
                f"{statistics.fmean(row['seconds'] for row in runs):.0f}",
            ]
        )
    header = ["network", "units", "trained parameters"]
    header += ["before rounding, %", "after rounding, %", "at the end, %", "s"]
    return markdown_table(header, lines)


def mean_and_range(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Format mean, least and greatest value; empty if the rows do not have this key."""
    if key not in rows[0]:
        return ""
    values = [row[key] for row in rows]
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def train(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each training."""
    for arm in ARMS:
        for seed in range(seeds):
            yield measure(arm, seed, steps)


def main() -> None:
    settings = {
        "lr": LR,
        "position_lr_scale": POSITION_LR_SCALE,
        "shrinking": SHRINKING,
        "rounding": ROUNDING,
    }
    run_trainings(__doc__, "delays", train, table, seeds=5, steps=600, settings=settings)


if __name__ == "__main__":
    main()
