"""Shared by the experiments with series: causal and spiking networks, training.

Axes: N series, C channels, T steps.
"""

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dcls_convert.tuning import param_groups

WARM_UP = 50  # steps
IGNORED = -100  # class of what is not scored; PyTorch's default in losses

Data = tuple[Tensor, Tensor]  # series (N, C, T), classes (N,) or (N, T)


# A causal network.


class CausalConv(nn.Module):
    """A convolution whose outputs depend on the past alone."""

    def __init__(self, channels: int, *, kernel_size: int, dilation: int, groups: int) -> None:
        super().__init__()
        self.past = dilation * (kernel_size - 1)
        self.conv = nn.Conv1d(channels, channels, kernel_size, dilation=dilation, groups=groups)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, T)
        return self.conv(nn.functional.pad(x, (self.past, 0)))  # (N, C, T)


class CausalNetwork(nn.Module):
    """Residual blocks of ReLU and causal convolutions, from classes to classes.

    If it is separable, a block has a depthwise convolution, ReLU and a pointwise one.
    """

    def __init__(
        self, *, classes: int, width: int, blocks: int, dilation: int, separable: bool
    ) -> None:
        super().__init__()
        self.stem = nn.Conv1d(classes, width, 1)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            groups = width if separable else 1
            conv = CausalConv(width, kernel_size=3, dilation=dilation, groups=groups)
            if separable:
                self.blocks.append(nn.Sequential(conv, nn.ReLU(), nn.Conv1d(width, width, 1)))
            else:
                self.blocks.append(nn.Sequential(nn.ReLU(), conv))
        self.head = nn.Conv1d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:  # (N, classes, T)
        x = self.stem(x)  # (N, width, T)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # (N, classes, T)


# A spiking network.


class _Spike(torch.autograd.Function):
    """1 above 0, else 0; the gradient is that of an arctan (surrogate gradient)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return gradient / (1 + (math.pi * potential) ** 2)


def leaky_integrate_and_fire(current: Tensor, *, keep: float) -> Tensor:
    """Return the spikes (N, C, T) of units with threshold 1, which are 0 after a spike.

    Args:
        current: Inputs of the units (N, C, T).
        keep: Share of the potential that is left after a step.
    """
    potential = torch.zeros_like(current[..., 0])
    spikes = []
    for step in range(current.shape[-1]):
        potential = keep * potential + current[..., step]
        spike = _Spike.apply(potential - 1)
        potential = potential * (1 - spike.detach())
        spikes.append(spike)
    return torch.stack(spikes, dim=-1)


class SpikingNetwork(nn.Module):
    """One layer of spiking units; classes are read from the number of their spikes."""

    def __init__(self, *, inputs: int, units: int, classes: int, keep: float) -> None:
        super().__init__()
        self.keep = keep
        self.hidden = nn.Conv1d(inputs, units, 1, bias=False)
        # Two inputs together reach the threshold of 1, most single ones do not.
        nn.init.uniform_(self.hidden.weight, 0.3, 1.0)
        self.readout = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:  # (N, inputs, T)
        spikes = leaky_integrate_and_fire(self.hidden(x), keep=self.keep)  # (N, units, T)
        return self.readout(spikes.sum(-1))  # (N, classes)


# Training.


def train_(
    model: nn.Module,
    batches: Iterator[Data],
    *,
    steps: int,
    lr: float,
    position_lr_scale: float,
    before_step: Callable[[int], None],
) -> float:
    """Train with Adam, a linear warm-up and a cosine to 0; return the seconds.

    Args:
        before_step: Called with the number of each step, before it.
    """
    groups = param_groups(model, lr=lr, weight_decay=0.0, position_lr_scale=position_lr_scale)
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    start = time.perf_counter()
    for step in range(steps):
        before_step(step)
        series, classes = next(batches)
        loss = nn.functional.cross_entropy(model(series), classes, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the accuracy in percent."""
    series, classes = data
    scored = classes != IGNORED
    right = model(series).argmax(1) == classes
    return 100 * float(right[scored].float().mean())


def trained_parameters(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
