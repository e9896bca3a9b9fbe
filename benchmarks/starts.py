"""Measure how scaling random elements changes a network's initial outputs and a short training.

    python benchmarks/starts.py [--seeds N] [--steps N] [--table]

A kernel has fewer random elements than the old kernel has cells, and each element is spread over
several cells, so a layer's outputs are smaller than before. In networks without norms, `convert_`
therefore scales the elements ("scaled"). Here, networks with and without norms start both ways:

- VGG-11 as torchvision initialises it, at 224 pixels: the standard deviation of its logits, divided
  by that of the dense network.
- Nine plain convolutions, a small ConvNeXt and timm's test_resnet, trained on digits of 32 pixels:
  accuracy in percent on the other digits.

Results go to benchmarks/results/starts.jsonl.
"""

import copy
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
import torchvision
from measuring import markdown_table, replaced, run_trainings
from small import Data, accuracy, digits, mean_and_spread, small_convnext, train_
from torch import Tensor, nn

import dcls_convert
from dcls_convert.starts import start

BATCH = 64  # images
SIDE = 32  # pixels of a digit
TRAIN_DIGITS = 1200  # of 1797; the others are test images
LR = 1e-3
POSITIONS = "uniform"
STARTS = ("dense", "as drawn", "scaled")


def plain() -> nn.Module:
    """Nine 3x3 convolutions without norms, initialised as VGG; maps of 32, 16 and 8 cells."""
    layers: list[nn.Module] = []
    channels = 1
    for width, stride in [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1)]:
        layers += [nn.Conv2d(channels, width, 3, stride=stride, padding=1), nn.ReLU()]
        channels = width
    layers += [nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


NETWORKS = {  # name -> network, window
    "plain": (plain, 7),
    "ConvNeXt": (lambda: small_convnext(in_channels=1, classes=10), 13),
    "test_resnet": (lambda: timm.create_model("test_resnet", in_chans=1, num_classes=10), 7),
}


def network_with_start(
    dense: nn.Module, variant: str, window: int, seed: int, side: int
) -> nn.Module:
    """Return a copy of the network, dense or converted with random elements."""
    model = copy.deepcopy(dense)
    if variant == "dense":
        return model
    channels = next(model.parameters()).shape[1]
    # `apply_plan_` scales random elements only where has_norms(model) is False.
    with replaced(start, "has_norms", lambda model: variant == "as drawn"):
        dcls_convert.convert_(
            model,
            dilated_size=window,
            init="random",
            positions=POSITIONS,
            seed=seed,
            input_size=(channels, side, side),
        )
    return model


def split_digits() -> tuple[Data, Data]:
    """Return images (N, 1, 32, 32) and classes for training, and the same for testing."""
    images, classes = digits(SIDE)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[:TRAIN_DIGITS]
    test = order[TRAIN_DIGITS:]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(data: Data, seed: int) -> Iterator[Data]:
    images, classes = data
    generator = torch.Generator().manual_seed(seed)
    while True:
        picked = torch.randint(len(images), (BATCH,), generator=generator)
        yield images[picked], classes[picked]


@torch.no_grad()
def deviation_of_logits(model: nn.Module, images: Tensor) -> float:
    return float(model.eval()(images).std())


def measure(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(seed)
    vgg = torchvision.models.vgg11()
    noise = torch.randn(2, 3, 224, 224)
    dense_logits = deviation_of_logits(vgg, noise)
    for variant in STARTS:
        network = network_with_start(vgg, variant, 7, seed, 224)
        logits = deviation_of_logits(network, noise)
        yield {"network": "VGG-11, logits", "start": variant, "value": logits / dense_logits}
    train, test = split_digits()
    for name, (make, window) in NETWORKS.items():
        torch.manual_seed(seed)
        dense = make()
        for variant in STARTS:
            model = network_with_start(dense, variant, window, seed, SIDE)
            train_(model, batches(train, seed), steps=steps, lr=LR)
            yield {"network": name, "start": variant, "value": accuracy(model.eval(), test)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        cells = []
        for variant in STARTS:
            values = [
                row["value"] for row in rows if (row["network"], row["start"]) == (network, variant)
            ]
            digits_shown = 2 if statistics.fmean(values) < 10 else 1
            cells.append(mean_and_spread(values, digits_shown))
        lines.append([network, *cells])
    return markdown_table(["network", *STARTS], lines)


def train(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of each seed."""
    for seed in range(seeds):
        for row in measure(seed, steps):
            yield {"seed": seed, **row}


def main() -> None:
    settings = {"lr": LR, "positions": POSITIONS}
    run_trainings(__doc__, "starts", train, table, seeds=3, steps=225, settings=settings)


if __name__ == "__main__":
    main()
