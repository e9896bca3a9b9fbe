"""Time a network: the same images through a forward pass and a training step."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DclsConvertError
from ..networks.model_outputs import tensors_in
from ..networks.running import run
from ..options import CPU_BATCH, GPU_BATCH, TIMING_SECONDS
from ..planning.plan import ConversionPlan
from ..surgery.apply_plan import apply_plan_
from ..text import shown
from .results import Timing, TimingSettings

CALLS_ON_GPU = 5  # for one measured time, which is their mean


def check_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        DclsConvertError: Nothing can be timed on it.
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shown(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


def timing_settings(
    device: str | None, batch: int | None, seconds: int | None, *, amp: bool
) -> tuple[TimingSettings, torch.device]:
    """How a sweep measures times, and where.

    Args:
        device: As torch names it; None: the CPU.
        batch: Images at a time; None: CPU_BATCH or GPU_BATCH.
        seconds: Time for all rows together; None: TIMING_SECONDS.
        amp: In bfloat16 autocast.

    Raises:
        DclsConvertError: Nothing can be timed on the device.
    """
    place = check_device(device or "cpu")
    name = str(place)
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
    default_batch = GPU_BATCH
    threads = None
    if place.type == "cpu":
        default_batch = CPU_BATCH
        threads = torch.get_num_threads()
    settings = TimingSettings(
        device=name,
        batch=batch or default_batch,
        seconds=seconds or TIMING_SECONDS,
        amp=amp,
        threads=threads,
        torch=torch.__version__,
    )
    return settings, place


def converted_copy(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """A copy of the model, converted, with random elements.

    It shares the tensors that are not converted with the model, to save memory.
    """
    not_copied: dict[int, Any] = {}  # the memo of deepcopy
    for tensor in (*model.parameters(), *model.buffers()):
        not_copied[id(tensor)] = tensor
    converted = copy.deepcopy(model, not_copied)
    apply_plan_(converted, plan, init="random")
    return converted


def quartiles(runs: Sequence[float]) -> Timing:
    """Quartiles of the runs' milliseconds, by linear interpolation."""
    if len(runs) == 1:
        return Timing(median=runs[0], first_quartile=runs[0], third_quartile=runs[0], runs=1)
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive")
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


def forward_and_step_ms(model: nn.Module, images: Tensor, *, amp: bool) -> tuple[float, float]:
    """Milliseconds of a forward pass and of a training step."""
    device = images.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)
    calls = 1 if device.type == "cpu" else CALLS_ON_GPU
    try:
        forward_ms = mean_milliseconds(forward_pass(model, images, autocast), calls, device)
        step_ms = mean_milliseconds(training_step(model, images, autocast), calls, device)
        return forward_ms, step_ms
    finally:
        model.zero_grad(set_to_none=True)


def forward_pass(model: nn.Module, images: Tensor, autocast: torch.autocast) -> Callable[[], None]:
    """A function that infers once; puts the model into eval mode."""
    model.eval()

    def forward() -> None:
        with torch.no_grad(), autocast:
            run(model, images)

    return forward


def training_step(model: nn.Module, images: Tensor, autocast: torch.autocast) -> Callable[[], None]:
    """A function that trains for one step; puts the model into training mode.

    The learning rate is 0, so a step changes no weights, only statistics such as BatchNorm's.
    """
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            outputs = tensors_in(run(model, images))
            losses = [o.float().square().mean() for o in outputs if o.requires_grad]
            loss = torch.as_tensor(sum(losses))
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def mean_milliseconds(call: Callable[[], None], calls: int, device: torch.device) -> float:
    """The mean time of calls in a row; on a GPU, with one wait for the last of them."""
    has_queue = device.type != "cpu"
    if has_queue:
        torch.accelerator.synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if has_queue:
        torch.accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - began) / calls


def mean_device_milliseconds(call: Callable[[], None], calls: int, device: torch.device) -> float:
    """The same by the device's own clock, between two events; on the CPU, by the wall clock.

    So the last wait for the device does not count, which matters for short layers.
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
