"""Time a forward pass and a training step of a network."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..conversion.apply_plan import apply_plan_
from ..errors import DclsConvertError
from ..networks.copying import copy_network
from ..networks.model_outputs import tensors_in
from ..networks.running import run_batch
from ..options import CPU_BATCH, GPU_BATCH, TIMING_SECONDS
from ..planning.plan import ConversionPlan
from ..text import shortened
from .results import Timing, TimingSettings

CALLS_ON_GPU = 5  # calls per measurement, which is their mean time


def check_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        DclsConvertError: torch cannot use the device, or it is "meta".
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shortened(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


def timing_settings(
    device: str | None, batch: int | None, seconds: int | None, *, amp: bool
) -> tuple[TimingSettings, torch.device]:
    """Return how a sweep measures times, and the device to measure on.

    Args:
        device: Name of the device, as in torch; None for the CPU.
        batch: Images per batch; None for CPU_BATCH or GPU_BATCH.
        seconds: Time limit for all rows together; None for TIMING_SECONDS.
        amp: Measure in bfloat16 autocast.

    Raises:
        DclsConvertError: The device cannot be used.
    """
    torch_device = check_device(device or "cpu")
    name = str(torch_device)
    if torch_device.type == "cuda":
        name = torch.cuda.get_device_name(torch_device)
    default_batch = GPU_BATCH
    threads = None
    if torch_device.type == "cpu":
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
    return settings, torch_device


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


def quartiles(runs: Sequence[float]) -> Timing:
    """Compute quartiles of measured milliseconds, by linear interpolation."""
    if len(runs) == 1:
        return Timing(median=runs[0], first_quartile=runs[0], third_quartile=runs[0], runs=1)
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive")
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


def forward_and_step_ms(model: nn.Module, images: Tensor, *, amp: bool) -> tuple[float, float]:
    """Measure the milliseconds of a forward pass and of a training step."""
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
