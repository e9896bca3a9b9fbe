"""Networks that a function puts together, for tests of what outputs depend on."""

import torch.nn.functional as F
from torch import nn

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def conv(dims, size=3, channels=2, out=None, **options):
    options = {"padding": "same"} | options
    return CONVS[dims](channels, out or channels, size, **options)


class Call(nn.Module):
    """Convolutions, and a function that uses them."""

    def __init__(self, use, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.use = use

    def forward(self, x):
        return self.use(x, *self.convs)


def later(x, cells=1):
    """Shift along the last axis, to larger indices."""
    return F.pad(x, (cells, 0))[..., :-cells]
