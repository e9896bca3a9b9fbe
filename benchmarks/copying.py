"""Train small causal networks on a task that needs a longer memory than theirs.

    python benchmarks/copying.py [--seeds N] [--steps N] [--table]

A series has random symbols, 8 of them. At every step, the network must name the symbol of 20 steps
ago. The networks have three residual blocks with causal kernels of 3, so they see 7 steps; chance
is 12.5 %. One has dense kernels, 8 channels wide; one has depthwise kernels, each followed by a
pointwise convolution, 16 channels wide. They are trained

- as they are;
- with dilation 4, so that they see 25 steps;
- converted to windows of 25 steps that look back, with random elements. The budget of 100 % has
  room for one element in place of a kernel of 3: a weight with a delay.

Positions start either uniformly over the window, or near the newest steps, where the old kernels
were. From there they must find a step that they do not see at first, so their learning rate is 50
times that of the weights instead of 5 times. Sigmas of Gaussian elements shrink over the first
quarter.

Choices made by looking at results, on seeds from 100 on: the number of steps, the width, and the
learning rate of positions near the newest steps. With 16 dense or 32 depthwise channels, frozen
positions did as well as learnt ones. With 5 times the rate of the weights, neither bilinear nor
Gaussian elements got further than chance from the newest steps. Layers do not share positions here
(tie="none"); with shared ones, the default, uniform starts learnt the task as well.

Each seed has its own weights and symbols. Seconds are of the training, in one thread. Results go to
benchmarks/results/copying.jsonl.
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

SYMBOLS = 8
LAG = 20  # steps
LENGTH = 64  # steps of a series
BLOCKS = 3
WINDOW = 25  # steps
BATCH = 16  # series
TEST_SERIES = 500
LR = 3e-3
SHRINKING = 0.25  # share of the training in which sigmas shrink
WIDTH = {"dense": 8, "depthwise": 16}  # network -> channels


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train a network."""

    name: str
    dilation: int = 1
    positions: str | None = None  # where they start; None if the network is not converted
    frozen: bool = False
    interpolation: str = "bilinear"
    position_lr_scale: float = 5.0


ARMS = (
    Arm(name="original"),
    Arm(name="original, dilation 4", dilation=4),
    Arm(name="converted", positions="uniform"),
    Arm(name="converted, positions frozen", positions="uniform", frozen=True),
    Arm(name="converted, from newest steps", positions="normal", position_lr_scale=50.0),
    Arm(
        name="converted, from newest steps, Gaussian",
        positions="normal",
        position_lr_scale=50.0,
        interpolation="gaussian",
    ),
)


def make_series(count: int, generator: "torch.Generator") -> "Data":
    """Return symbols (N, SYMBOLS, LENGTH), one-hot, and the symbols of LAG steps ago."""
    import torch
    from series import IGNORED

    symbols = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    before = torch.full_like(symbols, IGNORED)
    before[:, LAG:] = symbols[:, :-LAG]
    return torch.nn.functional.one_hot(symbols, SYMBOLS).mT.float().contiguous(), before


def batches(generator: "torch.Generator") -> "Iterator[Data]":
    while True:
        yield make_series(BATCH, generator)


def make_network(kind: str, arm: Arm, seed: int) -> "tuple[nn.Module, int]":
    """Return the network of an arm, and its MACs."""
    import torch
    from series import CausalNetwork

    import dcls_convert

    torch.manual_seed(seed)
    network = CausalNetwork(
        classes=SYMBOLS,
        width=WIDTH[kind],
        blocks=BLOCKS,
        dilation=arm.dilation,
        separable=kind == "depthwise",
    )
    input_size = (SYMBOLS, LENGTH)
    if arm.positions is None:
        return network, dcls_convert.find_convs(network, input_size=input_size).macs
    report = dcls_convert.convert_(
        network,
        dilated_size=WINDOW,
        init="random",
        positions=arm.positions,
        interpolation=arm.interpolation,
        tie="none",
        seed=seed,
        input_size=input_size,
    )
    if arm.frozen:
        for name, parameter in network.named_parameters():
            if name.endswith("positions"):
                parameter.requires_grad_(False)
    return network, report.macs.after


def measure(kind: str, arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Train one network; return its row."""
    import torch
    from series import accuracy, train_

    from dcls_convert.tuning import shrink_sigma_

    network, macs = make_network(kind, arm, seed)

    def before_step(step: int) -> None:
        if arm.interpolation == "gaussian":
            shrink_sigma_(network, step / (SHRINKING * steps))

    generator = torch.Generator().manual_seed(seed)
    seconds = train_(
        network,
        batches(generator),
        steps=steps,
        lr=LR,
        position_lr_scale=arm.position_lr_scale,
        before_step=before_step,
    )
    return {
        "network": kind,
        "arm": arm.name,
        "seed": seed,
        "accuracy": accuracy(network, make_series(TEST_SERIES, generator)),
        "parameters": sum(tensor.numel() for tensor in network.parameters()),
        "macs": macs,
        "seconds": seconds,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a line for each network and arm."""
    members: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        members.setdefault((row["network"], row["arm"]), []).append(row)
    lines = []
    for (kind, arm), runs in members.items():
        accuracies = [row["accuracy"] for row in runs]
        lines.append(
            [
                f"{kind}: {arm}",
                f"{statistics.fmean(accuracies):.1f}",
                f"{min(accuracies):.1f} to {max(accuracies):.1f}",
                f"{runs[0]['parameters']:,}",
                f"{runs[0]['macs'] / 1000:.0f}",
                f"{statistics.fmean(row['seconds'] for row in runs):.0f}",
            ]
        )
    header = ["network", "accuracy, %", "least to most", "parameters", "MACs, k", "s"]
    return markdown_table(header, lines)


def train(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each training."""
    for kind in WIDTH:
        for arm in ARMS:
            for seed in range(seeds):
                yield measure(kind, arm, seed, steps)


def main() -> None:
    settings = {"lr": LR, "batch": BATCH, "lag": LAG, "window": WINDOW}
    run_trainings(__doc__, "copying", train, table, seeds=5, steps=600, settings=settings)


if __name__ == "__main__":
    main()
