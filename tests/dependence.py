"""Which input cells the outputs of a network depend on, by derivatives."""

import torch
from torch import nn


class WithOrdinary(nn.Module):
    """Returns the outputs of a module and, beside them, those of a convolution to convert."""

    def __init__(self, odd, ordinary):
        super().__init__()
        self.odd = odd
        self.ordinary = ordinary

    def forward(self, x):
        return self.odd(x), self.ordinary(x)


def seen(model, input_size):
    """For every output cell of `odd`, the input cells that it depends on."""

    def outputs(x):
        return model(x)[0].flatten()

    x = torch.randn(1, *input_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.autograd.functional.jacobian(outputs, x).flatten(1) != 0
