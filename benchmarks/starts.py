"""What scaling random elements does to the start of a network, and to what it learns in short.

    python benchmarks/starts.py [--seeds N] [--steps N]
    python benchmarks/starts.py --table

Random elements are fewer than the cells of the old kernel, and each is spread over several cells,
so a layer's outputs are smaller than those of the old one. Where no norm stands behind the layers,
`convert_` scales them ("scaled"). Here, networks without norms and with them start both ways:

- VGG-11 as torchvision initialises it, at 224 pixels: the deviation of its logits, divided by that
  of the dense network's.
- Nine plain convolutions, a small ConvNeXt and timm's test_resnet, trained on digits of 32 pixels:
  percent right of those that were not trained on.
"""

import copy
import statistics
from collections.abc import Iterator
from typing import Any

import timm
import torch
import torchvision
from measuring import markdown_table, replaced
from small import (
    Data,
    Settings,
    accuracy,
    digits,
    main,
    mean_and_spread,
    small_convnext,
    train_,
)
from torch import Tensor, nn

import dcls_convert
from dcls_convert.surgery import start

BATCH = 64  # images
SIDE = 32  # pixels of a digit
TO_TRAIN = 1200  # of 1797 digits; the others test
SETTINGS: Settings = {"steps": 225, "lr": 1e-3, "positions": "uniform"}
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


def started(
    dense: nn.Module, how: str, window: int, seed: int, side: int, settings: Settings
) -> nn.Module:
    """A copy of the network, dense or converted with random elements."""
    model = copy.deepcopy(dense)
    if how == "dense":
        return model
    channels = next(model.parameters()).shape[1]
    # `apply_plan_` scales random elements only where has_norms(model) is False.
    with replaced(start, "has_norms", lambda model: how == "as drawn"):
        dcls_convert.convert_(
            model,
            dilated_size=window,
            init="random",
            positions=settings["positions"],
            seed=seed,
            input_size=(channels, side, side),
        )
    return model


def divided_digits() -> tuple[Data, Data]:
    """Images (N, 1, 32, 32) and classes to train on, and to test with."""
    images, classes = digits(SIDE)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[:TO_TRAIN]
    test = order[TO_TRAIN:]
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


def measure(seed: int, settings: Settings) -> Iterator[dict[str, Any]]:
    torch.manual_seed(seed)
    vgg = torchvision.models.vgg11()
    noise = torch.randn(2, 3, 224, 224)
    dense_logits = deviation_of_logits(vgg, noise)
    for how in STARTS:
        logits = deviation_of_logits(started(vgg, how, 7, seed, 224, settings), noise)
        yield {"network": "VGG-11, logits", "start": how, "value": logits / dense_logits}
    train, test = divided_digits()
    for name, (make, window) in NETWORKS.items():
        torch.manual_seed(seed)
        dense = make()
        for how in STARTS:
            model = started(dense, how, window, seed, SIDE, settings)
            train_(model, batches(train, seed), steps=settings["steps"], lr=settings["lr"])
            yield {"network": name, "start": how, "value": accuracy(model.eval(), test)}


def table(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        cells = []
        for how in STARTS:
            values = [
                row["value"] for row in rows if (row["network"], row["start"]) == (network, how)
            ]
            digits_shown = 2 if statistics.fmean(values) < 10 else 1
            cells.append(mean_and_spread(values, digits_shown))
        lines.append([network, *cells])
    yield markdown_table(["network", *STARTS], lines)


if __name__ == "__main__":
    main(__doc__, "starts", measure, SETTINGS, table)
