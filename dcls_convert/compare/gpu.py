"""Check depthwise layers on a device, and time a network there: a row for each measurement."""

import contextlib
import copy
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..depthwise.choice import VARIABLE, Preference, choices, fastest_conv2d
from ..depthwise.matmul import is_channels_last
from ..errors import DclsConvertError, PlanError, is_out_of_memory
from ..geometry import size_text
from ..layers.dcls_conv import DclsConv2d
from ..networks.running import full_precision
from ..pipeline.loaded import LoadedNetwork
from ..pipeline.resolved import resolve
from ..records import Record
from ..surgery.fold import fold_to_dense_
from ..sweeps.timing import (
    check_device,
    converted_copy,
    forward_pass,
    mean_device_milliseconds,
    training_step,
)
from ..text import one_line, shown

# proof: the accuracy of matrix products; network, layer: the time of these.
Part = Literal["proof", "network", "layer"]
Work = Literal["inference", "training"]

WORKS: tuple[Work, ...] = ("inference", "training")
ALGORITHMS: tuple[Preference, ...] = ("torch", "matmul")
GPU_BATCHES = (64, 8, 1)
CPU_BATCHES = (2, 1)  # for a trial of the command
# What the accuracy is checked with.
ACCURACY_WINDOW = 17
ACCURACY_IMAGES = 2
# (channels, side of the map). The last one's banks of shifted windows exceed what is made at once
# (matmul.MAX_BYTES) in every dtype, so its channels are taken in parts.
ACCURACY_MAPS = ((8, 7), (8, 13), (8, 16), (1600, 28))
# Largest relative error, norm by norm, of results whose inputs are exact. Rounding the result alone
# gives a fifth of the first two; TF32, or a reduction in a lower precision, exceeds the last.
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
MS_OF_A_ROUND = 100.0
MAX_CALLS = 50  # in a round
ROUNDS = 3
MIN_GAIN = 1.1  # by which another algorithm must be faster for the verdict to name it
OUT_OF_MEMORY = "out of memory"
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """One measurement. None: not measured, or it does not apply."""

    part: Part
    what: str
    # The algorithm asked for; None: layers that the package does not compute.
    way: Preference | None = None
    work: Work | None = None
    batch: int
    error: float | None = None  # relative, of the output or of a gradient, the largest
    ms: float | None = None  # median of a call
    images_per_second: float | None = None
    peak_mib: float | None = None  # most memory that torch has allocated, weights included
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport(Record):
    """All rows, and what they were measured with."""

    format: int = 1
    model: str
    device: str  # its name
    torch: str  # version
    backend: str | None  # version of CUDA or ROCm
    dtype: str  # of autocast, for networks and layers
    rows: tuple[GpuRow, ...]
    not_begun: int  # measurements of networks and layers for which the time was too short
    choices: tuple[str, ...]  # algorithms that the package chose itself, in the networks
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What is timed, for any batch."""

    part: Part
    what: str
    model: nn.Module
    input: Tensor  # for one image
    algorithm: Preference | None  # None: as in a row
    work: Work


class GpuCheck:
    """The measurements of a network on a device.

    Args:
        loaded: The network, and how to convert it.
        device: A device from `gpu_device`.
        seconds: After which no measurement is begun.

    Raises:
        DclsConvertError: The network cannot be loaded or converted, or takes no known input.
    """

    def __init__(self, loaded: LoadedNetwork, device: torch.device, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.rows: list[GpuRow] = []  # of the measurements so far
        self.not_begun = 0  # measurements, until their turn comes
        self.device = device
        self.model = str(loaded.request.model)
        input_size = loaded.convs.input_size
        if input_size is None:
            raise PlanError(f"{shown(self.model)}: {loaded.convs.macs_note}")
        self.image = torch.randn(1, *input_size, device=device)
        self.dtype = torch.bfloat16
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            self.dtype = torch.float16
        self.autocast = torch.autocast(device.type, self.dtype)
        self.batches = CPU_BATCHES if device.type == "cpu" else GPU_BATCHES
        plan = resolve(loaded).plan
        self.original = loaded.network.to(device)
        self.converted = converted_copy(self.original, plan)
        self.folded = copy.deepcopy(self.converted)
        fold_to_dense_(self.folded)

    def measure(self) -> Iterator[GpuRow]:
        """Make all measurements; yield the row of each as soon as it is made.

        Compiled networks are last, since compiling takes about a minute for each.
        """
        for row in self._measured_rows():
            self.rows.append(row)
            yield row

    def _measured_rows(self) -> Iterator[GpuRow]:
        yield from self._accuracy_rows()
        measurements = list(itertools.product(self.batches, self._network_cases()))
        for case in (*self._layer_cases(), *self._compiled_cases()):
            measurements.append((self.batches[0], case))
        self.not_begun = len(measurements)
        for batch, case in measurements:
            if time.monotonic() >= self.end:
                return
            self.not_begun -= 1
            yield from self._timed_rows(case, batch)

    def report(self) -> GpuReport:
        """The rows so far, the package's choices so far, and the verdict on them."""
        name = str(self.device)
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return GpuReport(
            model=shown(self.model),
            device=name,
            torch=torch.__version__,
            backend=torch.version.cuda or torch.version.hip,
            dtype=str(self.dtype),
            rows=tuple(self.rows),
            not_begun=self.not_begun,
            choices=tuple(str(choice) for choice in choices() if VARIABLE not in choice.why),
            verdict=verdict(self.rows),
        )

    def _accuracy_rows(self) -> Iterator[GpuRow]:
        """The largest error of matrix products for each map and dtype."""
        for channels, side in ACCURACY_MAPS:
            for dtype, most in MAX_ERROR.items():
                error = None
                problem = None
                try:
                    with full_precision(), forced_algorithm("matmul"):
                        error = largest_error(channels, side, dtype, self.device)
                except Exception as failure:  # of a library on this device: what is to be found
                    problem = _reason(failure)
                if error is not None and not error <= most:  # NaN too
                    problem = f"wrong: {error:.1e}, where {most:g} is allowed"
                    error = None
                yield GpuRow(
                    part="proof",
                    what=f"{channels} channels of {side}x{side}, {_name(dtype)}",
                    way="matmul",
                    batch=ACCURACY_IMAGES,
                    error=error,
                    problem=problem,
                )

    def _network_cases(self) -> list[_Case]:
        cases = []
        for work in WORKS:
            cases.append(self._network_case("dense", self.original, None, work))
            for algorithm in ("auto", *ALGORITHMS):
                cases.append(self._network_case("converted", self.converted, algorithm, work))
        cases.append(self._network_case("folded", self.folded, None, "inference"))
        return cases

    def _compiled_cases(self) -> list[_Case]:
        original: Any = torch.compile(self.original)
        converted: Any = torch.compile(self.converted)
        cases = []
        for work in WORKS:
            cases.append(self._network_case("converted, compiled", converted, "auto", work))
            cases.append(self._network_case("dense, compiled", original, None, work))
        return cases

    def _network_case(
        self, what: str, model: nn.Module, algorithm: Preference | None, work: Work
    ) -> _Case:
        return _Case(
            part="network",
            what=what,
            model=model,
            input=self.image,
            algorithm=algorithm,
            work=work,
        )

    def _layer_cases(self) -> list[_Case]:
        """Both algorithms for each kind of depthwise layer in the network."""
        cases = []
        for layer, maps in self._distinct_layers():
            size = f"{layer.in_channels} channels of {size_text(maps.shape[2:])}"
            what = f"{size}, {size_text(layer.dilated_kernel_size)}"
            for work in WORKS:
                for algorithm in ALGORITHMS:
                    case = _Case(
                        part="layer",
                        what=what,
                        model=layer,
                        input=maps,
                        algorithm=algorithm,
                        work=work,
                    )
                    cases.append(case)
        return cases

    def _distinct_layers(self) -> list[tuple[DclsConv2d, Tensor]]:
        """One depthwise layer of each kind, with its input for one image."""
        layers: dict[object, tuple[DclsConv2d, Tensor]] = {}

        def note(layer: Any, arguments: tuple[Tensor, ...]) -> None:
            maps = arguments[0]
            kind = (maps.shape, layer.dilated_kernel_size, layer.stride)
            if layer.groups == layer.in_channels:
                layers.setdefault(kind, (layer, maps))

        hooks = []
        for module in self.converted.modules():
            if isinstance(module, DclsConv2d):
                hooks.append(module.register_forward_pre_hook(note))
        forward_pass(self.converted, self.image, self.autocast)()
        for hook in hooks:
            hook.remove()
        return list(layers.values())

    def _timed_rows(self, case: _Case, batch: int) -> Iterator[GpuRow]:
        """The row of a case; if memory is exhausted, another one for half of the batch."""
        while batch:
            row = self._timed_row(case, batch)
            yield row
            if row.problem != OUT_OF_MEMORY:
                return
            batch //= 2

    def _timed_row(self, case: _Case, batch: int) -> GpuRow:
        known: dict[str, Any]
        try:
            with forced_algorithm(case.algorithm or "auto"):
                known = self._time(case, batch)
        except Exception as failure:  # of a library or compiler: a result for this device
            known = {"problem": _reason(failure)}
        case.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return GpuRow(
            part=case.part,
            what=case.what,
            way=case.algorithm,
            work=case.work,
            batch=batch,
            **known,
        )

    def _time(self, case: _Case, batch: int) -> dict[str, float]:
        """Fields of the row."""
        memory_format = torch.contiguous_format
        if is_channels_last(case.input):
            memory_format = torch.channels_last
        images = torch.randn(batch, *case.input.shape[1:], device=self.device)
        images = images.contiguous(memory_format=memory_format)
        # A layer inside of a network also computes its input's gradient.
        images.requires_grad_(case.part == "layer")
        make = forward_pass if case.work == "inference" else training_step
        call = make(case.model, images, self.autocast)
        call()  # sets up libraries, and compiles
        known = {}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        first_ms = mean_device_milliseconds(call, 1, self.device)
        if self.device.type == "cuda":
            known["peak_mib"] = torch.cuda.max_memory_allocated(self.device) / MIB
        calls = min(max(1, round(MS_OF_A_ROUND / first_ms)), MAX_CALLS)
        rounds_ms = []
        for _ in range(ROUNDS):
            rounds_ms.append(mean_device_milliseconds(call, calls, self.device))
        ms = statistics.median(rounds_ms)
        return {**known, "ms": ms, "images_per_second": 1e3 * batch / ms}


def gpu_device(name: str | None) -> torch.device:
    """The device of this name; None: the GPU.

    Raises:
        DclsConvertError: There is none.
    """
    if name is None and not torch.cuda.is_available():
        raise DclsConvertError(
            "torch finds no GPU here (CUDA or ROCm); --device names another device, "
            "and --device cpu tries this command with small batches"
        )
    return check_device(name or "cuda")


def verdict(rows: Sequence[GpuRow]) -> str:
    """What to do, in one line: nothing, or where the environment should overrule the package."""
    for row in rows:
        if row.part == "proof" and row.problem is not None:
            return f"matrix products are wrong or fail here; export {VARIABLE}=torch, and report it"
    timed = [row for row in rows if row.ms is not None]
    own_choices = {}  # by kind: after "auto" exhausted the memory, a smaller batch has several rows
    for row in timed:
        if row.what == "converted" and row.way == "auto":
            own_choices[row.what, row.work, row.batch] = row
    if not own_choices:
        return "no converted network was timed"
    advice = []
    for kind, own in own_choices.items():
        rivals = [own]
        for row in timed:
            if row.way != own.way and (row.what, row.work, row.batch) == kind:
                rivals.append(row)
        best = min(rivals, key=_ms)
        gain = _ms(own) / _ms(best)
        if gain >= MIN_GAIN:
            advice.append(f"{best.way} for {own.work} at batch {own.batch} ({gain:.1f} x as fast)")
    if not advice:
        return "nothing to do: no algorithm is clearly faster than the package's own choice"
    return f"export {VARIABLE} as {', '.join(advice)}"


def _ms(row: GpuRow) -> float:
    assert row.ms is not None
    return row.ms


def largest_error(channels: int, side: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of a depthwise convolution and its gradients on the device.

    They are compared with float64 on the CPU, in Frobenius norms. All dtypes get the same inputs,
    rounded to bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (ACCURACY_IMAGES, channels, side, side),
        (channels, 1, ACCURACY_WINDOW, ACCURACY_WINDOW),
        (ACCURACY_IMAGES, channels, side, side),
    )
    exact = []
    for shape in shapes:
        exact.append(torch.randn(shape, generator=generator).bfloat16().double())
    padding = ACCURACY_WINDOW // 2
    maps, kernel, grad = (tensor.to(dtype).to(device) for tensor in exact)
    output = fastest_conv2d(
        maps.requires_grad_(),
        kernel.requires_grad_(),
        None,
        (1, 1),
        (padding,) * 2,
        (1, 1),
        channels,
    )
    results = [output, *torch.autograd.grad(output, (maps, kernel), grad)]
    maps, kernel, grad = exact
    output = F.conv2d(
        maps.requires_grad_(), kernel.requires_grad_(), padding=padding, groups=channels
    )
    expected = [output, *torch.autograd.grad(output, (maps, kernel), grad)]
    errors = []
    for result, wanted in zip(results, expected, strict=True):
        errors.append((result.detach().cpu().double() - wanted).norm() / wanted.norm())
    return torch.stack(errors).max().item()  # NaN if any is


@contextlib.contextmanager
def forced_algorithm(algorithm: Preference) -> Iterator[None]:
    """Inside, depthwise layers use this algorithm; they read the variable in every forward."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = algorithm
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _reason(failure: Exception) -> str:
    if is_out_of_memory(failure):
        return OUT_OF_MEMORY
    return f"{type(failure).__name__}: {one_line(failure)[:200]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
