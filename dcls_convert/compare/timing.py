"""Milliseconds of a forward pass and of a training step, of several models that take turns.

The models share every parameter that is not of a converted layer, so that memory holds little more than one of them;
training steps have the learning rate 0 and change nothing, but for running statistics.
"""

import contextlib
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from .candidates import Candidate
from .sweep import Timing, TimingSettings

LEAST_ROUNDS, MOST_ROUNDS = 3, 100
CALLS_ON_GPU = 5  # a measured run on a GPU is their mean, since the end of the last alone is waited for


@dataclass(slots=True)
class _Timed:
    """A candidate, the model that it becomes, and the milliseconds of its runs so far."""

    candidate: Candidate
    model: nn.Module
    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


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
    """The GPU's name; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def time_(
    candidates: Sequence[Candidate], model: nn.Module, settings: TimingSettings, device: torch.device, *, notify: Notify
) -> None:
    """Measure each candidate, and put the times into its row; the first is the dense original.

    All take turns, one round after the other. Where this is interrupted, the rows have the times measured so far.

    Args:
        model: The original, with weights of any values. Moved to the device; its parameters are shared.
        notify: Told about progress.
    """
    model.to(device)
    timed = list(_models(candidates, model, notify))
    size = next((candidate.plan.input_size for candidate in candidates if candidate.plan), None)
    if size is None:
        return
    images = torch.randn(settings.batch, *size, generator=torch.Generator().manual_seed(0))
    clock = _Clock(images.to(device), device, settings.amp)
    try:
        begun, least = time.perf_counter(), settings.seconds
        for count in range(-1, MOST_ROUNDS):  # a round for warmth first
            spent = time.perf_counter() - begun
            if (spent >= least and count >= LEAST_ROUNDS) or not timed:
                break
            notify("warming up" if count < 0 else f"timing, round {count + 1}, {spent:.0f} of {least:g} s")
            timed = [one for one in timed if clock.measure(one, keep=count >= 0)]
    finally:
        for one in timed:
            one.candidate.row = replace(one.candidate.row, forward_ms=summary(one.forward), step_ms=summary(one.step))


def _models(candidates: Sequence[Candidate], model: nn.Module, notify: Notify) -> Iterator[_Timed]:
    for candidate in candidates:
        if candidate.row.status == "original":
            yield _Timed(candidate, model)
        elif candidate.plan is not None:
            notify(f"building {candidate.row.window}")
            try:
                yield _Timed(candidate, converted_twin(model, candidate.plan))
            except Exception as error:
                candidate.fail(error, "building")


def converted_twin(model: nn.Module, plan: ConversionPlan) -> nn.Module:
    """The converted model with random elements; what is not converted is the model's own."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    apply_plan_(twin, plan, init="random")
    return twin


def summary(runs: Sequence[float]) -> Timing | None:
    """Quartiles, by linear interpolation; None without runs."""
    if not runs:
        return None
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else [runs[0]] * 3
    return Timing(median=middle, first_quartile=low, third_quartile=high, runs=len(runs))


class _Clock:
    def __init__(self, images: Tensor, device: torch.device, amp: bool) -> None:
        self.images, self.device, self.amp = images, device, amp
        self.calls = CALLS_ON_GPU if device.type != "cpu" else 1

    def measure(self, timed: _Timed, *, keep: bool) -> bool:
        """One run of each part; False where the model fails, which its row then says."""
        model = timed.model
        try:
            with contextlib.nullcontext() if keep else self._watching(timed):
                model.eval()
                forward = self._milliseconds(lambda: self._forward(model))
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            step = self._milliseconds(lambda: self._step(model, optimizer))
        except Exception as error:
            timed.candidate.fail(error, "timing")
            return False
        finally:
            model.zero_grad(set_to_none=True)
        timed.forward += [forward] * keep
        timed.step += [step] * keep
        return True

    def _milliseconds(self, call: Callable[[], object]) -> float:
        self._wait()
        begun = time.perf_counter()
        for _ in range(self.calls):
            call()
        self._wait()
        return 1e3 * (time.perf_counter() - begun) / self.calls

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    @torch.no_grad()
    def _forward(self, model: nn.Module) -> None:
        with self._autocast():
            run(model, self.images)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            outputs = tensors_in(run(model, self.images))
            loss = sum(output.float().square().mean() for output in outputs if output.requires_grad)
        torch.autograd.backward(torch.as_tensor(loss))
        optimizer.step()

    @contextlib.contextmanager
    def _watching(self, timed: _Timed) -> Iterator[None]:
        """Note in the row which ways the converted layers go."""
        ways: Counter[str] = Counter()
        handles = []
        names = {layer for layer in timed.model.modules() if isinstance(layer, DclsConvNd)}

        def note(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if layer in names:
                names.discard(layer)
                ways[self._way(layer, inputs[0])] += 1

        handles = [layer.register_forward_hook(note) for layer in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        timed.candidate.row = replace(timed.candidate.row, ways=dict(ways))

    def _way(self, layer: Any, input: Tensor) -> str:
        if layer.dims != 2 or input.dim() != 4:
            return "torch"
        input, padding = layer._padded(input)
        dtype = torch.bfloat16 if self.amp else input.dtype
        size = (layer.out_channels, layer.in_channels // layer.groups, *layer.dilated_kernel_size)
        geometry = (size, layer.stride, padding, layer.dilation, layer.groups)
        return depthwise_way(self.device, dtype, is_channels_last(input), tuple(input.shape), *geometry)
