"""The networks and requests of the golden conversions, by the names of their folders."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import nn

INPUT_SIZE = (3, 32, 32)


def convnext():
    return timm.create_model(
        "convnext_atto",
        depths=(2, 1, 1, 1),
        dims=(8, 8, 16, 16),
        num_classes=4,
        ls_init_value=0.5,
    )


def resnet():
    return timm.create_model("resnet10t", channels=(8, 8, 16, 16), stem_width=8, num_classes=4)


class Own(nn.Module):
    """A user's own network, with strides, a bias or none, and a rectangular kernel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.stages = nn.Sequential(
            nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, (3, 5), 2, padding=(1, 2), groups=8), nn.ReLU()),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenCase:
    network: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)  # of `convert_`
    calibrates: bool = False


CASES = {
    "random": GoldenCase(network=convnext, options={"dilated_size": 13, "init": "random"}),
    "fit": GoldenCase(network=convnext, options={"dilated_size": 13, "init": "fit"}),
    "exact": GoldenCase(
        network=convnext,
        options={"dilated_size": "+4", "init": "exact", "kernel_count": "exact"},
    ),
    "calibrated": GoldenCase(
        network=convnext, options={"dilated_size": 11, "init": "fit"}, calibrates=True
    ),
    "gaussian": GoldenCase(
        network=convnext,
        options={"dilated_size": 13, "init": "random", "interpolation": "gaussian"},
    ),
    "conv3x3": GoldenCase(network=resnet, options={"dilated_size": 7, "init": "fit"}),
    "own": GoldenCase(network=Own, options={"dilated_size": "+4", "init": "largest"}),
}
FOLDED = "random"  # the case that is folded, too


def seeded_network(case):
    """Build the unconverted network with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.network().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 2)
    return model


def images(number, seed=0):
    return torch.rand(number, *INPUT_SIZE, generator=torch.Generator().manual_seed(seed))


def options_of(case):
    options = {**case.options, "input_size": INPUT_SIZE, "seed": 0}
    if case.calibrates:
        # Smooth images, since photographs are smooth.
        smooth = nn.functional.interpolate(images(20, seed=1)[..., ::4, ::4], INPUT_SIZE[1:])
        options["calibration"] = smooth
    return options
