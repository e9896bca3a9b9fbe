"""A network that plans and converts in milliseconds, and writes nothing."""

from torch import nn


def build(num_classes: int = 10, in_chans: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_chans, 4, 3, 2, 1),
        nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 5, 1, 2, groups=4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )
