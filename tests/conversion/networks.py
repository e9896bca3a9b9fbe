"""A small network and noise for tests of conversions."""

import torch
from torch import nn


def small_model():
    """Return a model with a stem, a depthwise stage with BatchNorm in mixed modes, and a head.

    It has few operations, so that failures can be injected at many of them.
    """
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU())
        for _ in range(3)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model[1][0][1].eval()  # frozen
    return model


NOISE = (torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
