"""A network that plans and converts in milliseconds, and writes nothing."""

from collections import OrderedDict

from torch import nn


def build(num_classes: int = 10, in_chans: int = 3) -> nn.Module:
    """One of its names is long, for patterns that backtrack."""
    stage = OrderedDict(
        {
            "a" * 60: nn.Conv2d(4, 4, 3, 1, 1, groups=4),
            "norm": nn.BatchNorm2d(4),
            "conv": nn.Conv2d(4, 4, 5, 1, 2, groups=4),
        }
    )
    return nn.Sequential(
        nn.Conv2d(in_chans, 4, 3, 2, 1),
        nn.Sequential(stage),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )
