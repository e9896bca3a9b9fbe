"""Time a network: the same images through a forward pass and a training step."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError, shown
from ..networks.outputs import tensors_in
from ..networks.running import run
from ..planning.plan import ConversionPlan
from ..surgery.start import apply_plan_
from .sweep import Timing

CALLS_ON_GPU = (
    5  # a measured run on a GPU is their mean, since the end of the last alone is waited for
)


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
    """With random elements; what is not converted is the model's own, so that memory holds little
    more than one."""
    shared: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    converted = copy.deepcopy(model, shared)
    apply_plan_(converted, plan, init="random")
    return converted


def summary(runs: Sequence[float]) -> Timing:
    """Quartiles, by linear interpolation."""
    low, middle, high = (
        statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    )
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


def measure(model: nn.Module, images: Tensor, *, amp: bool) -> tuple[float, float]:
    """Milliseconds of a forward pass and of a training step, whose learning rate is 0: it changes
    statistics alone."""
    autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=amp)

    def forward() -> None:
        with torch.no_grad(), autocast:
            run(model, images)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            outputs = tensors_in(run(model, images))
            loss = sum(output.float().square().mean() for output in outputs if output.requires_grad)
        torch.autograd.backward(torch.as_tensor(loss))
        optimizer.step()

    try:
        model.eval()
        forward_ms = _milliseconds(forward, images.device)
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
        return forward_ms, _milliseconds(step, images.device)
    finally:
        model.zero_grad(set_to_none=True)


def _milliseconds(call: Callable[[], None], device: torch.device) -> float:
    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    calls = CALLS_ON_GPU if device.type != "cpu" else 1
    wait()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return 1e3 * (time.perf_counter() - begun) / calls
