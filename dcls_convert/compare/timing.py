"""Milliseconds of a forward pass and of a training step, of several models that take turns.

The models share every parameter that is not of a converted layer, so that memory holds little more than one of them;
training steps have the learning rate 0 and change nothing, but for running statistics.
"""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..depthwise.choice import depthwise_way
from ..depthwise.eager import is_channels_last
from ..errors import DclsConvertError, shown
from ..layers.dcls_conv import DclsConvNd
from ..networks.outputs import tensors_in
from ..networks.running import run
from ..planning.plan import ConversionPlan
from ..progress import Notify
from ..surgery.start import apply_plan_
from .sweep import Timing, TimingSettings

LEAST_ROUNDS, MOST_ROUNDS = 3, 100
CALLS_ON_GPU = 5  # a measured run on a GPU is their mean, since the end of the last alone is waited for


@dataclass(slots=True)
class Timed:
    """A model, and the milliseconds of its runs so far."""

    model: nn.Module
    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)  # of `depthwise_way`; converted layers that go each of them
    error: Exception | None = None  # for which it was given up

    @classmethod
    def of(cls, model: nn.Module, plan: ConversionPlan | None) -> Self:
        """The model itself, or converted with random elements; what is not converted is then the model's own."""
        if plan is None:
            return cls(model)
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        converted = copy.deepcopy(model, shared)
        apply_plan_(converted, plan, init="random")
        return cls(converted)

    @property
    def forward_ms(self) -> Timing | None:
        return _summary(self.forward)

    @property
    def step_ms(self) -> Timing | None:
        return _summary(self.step)


def check_device(name: str) -> torch.device:
    """The device of this name; DclsConvertError where nothing can be timed on it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DclsConvertError(f"device {shown(name)}: torch cannot use it here") from error
    if device.type == "meta":
        raise DclsConvertError("device meta computes nothing")
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def time_(
    timed: Sequence[Timed], input_size: Sequence[int], settings: TimingSettings, device: torch.device, *, notify: Notify
) -> None:
    """Measure models, which take turns; one that fails is given up. An interrupt leaves the times measured so far."""
    images = torch.randn(settings.batch, *input_size, generator=torch.Generator().manual_seed(0))
    clock = _Clock(images.to(device), device, settings.amp)
    begun = time.perf_counter()
    for count in range(-1, MOST_ROUNDS):  # a round for warmth first
        spent = time.perf_counter() - begun
        going = [one for one in timed if one.error is None]
        if (spent >= settings.seconds and count >= LEAST_ROUNDS) or not going:
            break
        notify("warming up" if count < 0 else f"timing, round {count + 1}, {spent:.0f} of {settings.seconds:g} s")
        for one in going:
            clock.measure(one, keep=count >= 0)


def _summary(runs: Sequence[float]) -> Timing | None:
    """Quartiles, by linear interpolation; None without runs."""
    if not runs:
        return None
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


class _Clock:
    def __init__(self, images: Tensor, device: torch.device, amp: bool) -> None:
        self.images, self.device, self.amp = images, device, amp

    def measure(self, timed: Timed, *, keep: bool) -> None:
        """A forward pass and a training step. The first one, which is not kept, notes the ways that layers go."""
        model, ways = timed.model, dict[Any, str]()

        def watch(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ways.setdefault(layer, self._way(layer, inputs[0]))

        def forward() -> None:
            with torch.no_grad(), self._autocast():
                run(model, self.images)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with self._autocast():
                outputs = tensors_in(run(model, self.images))
                loss = sum(output.float().square().mean() for output in outputs if output.requires_grad)
            torch.autograd.backward(torch.as_tensor(loss))
            optimizer.step()

        layers = [] if keep else [layer for layer in model.modules() if isinstance(layer, DclsConvNd)]
        hooks = [layer.register_forward_hook(watch) for layer in layers]
        try:
            model.eval()
            forward_ms = self._milliseconds(forward)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            step_ms = self._milliseconds(step)
        except Exception as error:
            timed.error = error
        else:
            timed.forward += [forward_ms] * keep
            timed.step += [step_ms] * keep
        finally:
            for hook in hooks:
                hook.remove()
            timed.ways.update(ways.values())
            model.zero_grad(set_to_none=True)

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

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    def _way(self, layer: Any, input: Tensor) -> str:
        if layer.dims != 2 or input.dim() != 4:
            return "torch"
        input, padding = layer._padded(input)
        dtype = torch.bfloat16 if self.amp else input.dtype
        size = (layer.out_channels, layer.in_channels // layer.groups, *layer.dilated_kernel_size)
        geometry = (size, layer.stride, padding, layer.dilation, layer.groups)
        return depthwise_way(self.device, dtype, is_channels_last(input), tuple(input.shape), *geometry)
