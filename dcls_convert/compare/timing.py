"""Time a network: the same images through a forward pass and a training step."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import DclsConvertError, shown
from ..networks.outputs import tensors_in
from ..networks.running import run
from ..planning.plan import ConversionPlan
from ..surgery.start import apply_plan_
from .sweep import Timing, TimingSettings

CALLS_ON_GPU = 5  # a measured run on a GPU is their mean, since the end of the last alone is waited for


def check_device(name: str) -> torch.device:
    """The device of this name; DclsConvertError where nothing can be timed on it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shown(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


def converted_copy(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """With random elements; what is not converted is the model's own, so that memory holds little more than one."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    converted = copy.deepcopy(model, shared)
    apply_plan_(converted, plan, init="random")
    return converted


def summary(runs: Sequence[float]) -> Timing:
    """Quartiles, by linear interpolation."""
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


class Clock:
    """Measures models on the same images."""

    def __init__(self, input_size: Sequence[int], settings: TimingSettings, device: torch.device) -> None:
        images = torch.randn(settings.batch, *input_size, generator=torch.Generator().manual_seed(0))
        self.images, self.device = images.to(device), device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.amp)

    def measure(self, model: nn.Module) -> tuple[float, float]:
        """A forward pass and a training step, whose learning rate is 0: it changes running statistics alone."""

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with self.autocast:
                outputs = tensors_in(run(model, self.images))
                loss = sum(output.float().square().mean() for output in outputs if output.requires_grad)
            torch.autograd.backward(torch.as_tensor(loss))
            optimizer.step()

        try:
            forward_ms = self._milliseconds(lambda: self._forward(model.eval()))
            optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
            return forward_ms, self._milliseconds(step)
        finally:
            model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _forward(self, model: nn.Module) -> None:
        with self.autocast:
            run(model, self.images)

    def _milliseconds(self, call: Callable[[], object]) -> float:
        calls = CALLS_ON_GPU if self.device.type != "cpu" else 1
        self._wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return 1e3 * (time.perf_counter() - begun) / calls

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
