"""Time a forward pass and a training step of a network, for the command `gpu`."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..conversion.apply_plan import apply_plan_
from ..networks.copying import copy_network
from ..networks.model_outputs import tensors_in
from ..networks.running import run_batch
from ..planning.plan import ConversionPlan


def converted_copy(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """Return a converted copy of the model, with random elements.

    To save memory, the copy shares the tensors that are not converted.
    """
    shared: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shared[id(tensor)] = tensor
    converted = copy_network(model, shared=shared)
    apply_plan_(converted, plan, init="random")
    return converted


def forward_pass(model: nn.Module, images: Tensor, autocast: torch.autocast) -> Callable[[], None]:
    """Put the model into eval mode, and return a function that runs one forward pass."""
    model.eval()

    def forward() -> None:
        with torch.no_grad(), autocast:
            run_batch(model, images)

    return forward


def training_step(model: nn.Module, images: Tensor, autocast: torch.autocast) -> Callable[[], None]:
    """Put the model into training mode, and return a function that runs one training step.

    The learning rate is 0, so a step changes no weights, only statistics such as BatchNorm's.
    """
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            outputs = tensors_in(run_batch(model, images))
            losses = []
            for output in outputs:
                if output.requires_grad:
                    losses.append(output.float().square().mean())
            loss = torch.as_tensor(sum(losses))
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def mean_milliseconds(call: Callable[[], None], calls: int, device: torch.device) -> float:
    """Return the mean time of consecutive calls, by the wall clock.

    On a GPU, this waits only once, after the last call.
    """
    is_asynchronous = device.type != "cpu"
    if is_asynchronous:
        torch.accelerator.synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if is_asynchronous:
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - began) / calls


def mean_device_milliseconds(call: Callable[[], None], calls: int, device: torch.device) -> float:
    """Return the mean time of consecutive calls, by the device's own clock.

    The final wait for the device then does not count, which matters for fast layers. On the CPU,
    the wall clock is used.
    """
    if device.type == "cpu":
        return mean_milliseconds(call, calls, device)
    start = torch.Event(device, enable_timing=True)
    end = torch.Event(device, enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls
