"""Check depthwise layers on a device, and time a network there. Each measurement is a row."""

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
from ..text import one_line, shortened

# proof: accuracy of the matrix products; network, layer: times.
Part = Literal["proof", "network", "layer"]
Work = Literal["inference", "training"]

WORKS: tuple[Work, ...] = ("inference", "training")
ALGORITHMS: tuple[Preference, ...] = ("torch", "matmul")
GPU_BATCHES = (64, 8, 1)
CPU_BATCHES = (2, 1)  # small, since they only serve to try the command
# Sizes of the accuracy check.
ACCURACY_WINDOW = 17
ACCURACY_IMAGES = 2
# (channels, side of the map). The last one exceeds matmul.MAX_BYTES in every dtype, so its channels
# are processed in parts.
ACCURACY_MAPS = ((8, 7), (8, 13), (8, 16), (1600, 28))
# Maximum relative error, in Frobenius norms, of results of exact inputs. The first two limits are
# about five times the error of rounding the result; TF32, or a reduction in a lower precision,
# exceeds the last.
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
ROUND_MS = 100.0
MAX_CALLS = 50  # per round
ROUNDS = 3
MIN_GAIN = 1.1  # the verdict names another algorithm only if it is this many times as fast
OUT_OF_MEMORY = "out of memory"
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    """One measurement. None means not measured, or not applicable."""

    part: Part
    what: str
    # The requested algorithm; None if the layers are not computed by this package.
    way: Preference | None = None
    work: Work | None = None
    batch: int
    error: float | None = None  # largest relative error of the output and the gradients
    ms: float | None = None  # median time of a call
    images_per_second: float | None = None
    peak_mib: float | None = None  # peak memory allocated by torch, weights included
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport(Record):
    """All rows, and the environment in which they were measured."""

    format: int = 1
    model: str
    device: str  # name
    torch: str  # version
    backend: str | None  # version of CUDA or ROCm
    dtype: str  # autocast dtype of networks and layers
    rows: tuple[GpuRow, ...]
    not_begun: int  # timings that did not fit into the time limit
    choices: tuple[str, ...]  # algorithms that the package itself chose in the networks
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A network or a layer to be timed, for any batch size."""

    part: Part
    name: str
    model: nn.Module
    input: Tensor  # for one image
    algorithm: Preference | None  # None if the layers are not computed by this package
    work: Work


class GpuCheck:
    """The measurements of a network on a device.

    Args:
        loaded: The network, and how to convert it.
        device: A device from `gpu_device`.
        seconds: Time after which no further measurement is started.

    Raises:
        DclsConvertError: The network cannot be loaded or converted, or its input size is unknown.
    """

    def __init__(self, loaded: LoadedNetwork, device: torch.device, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.rows: list[GpuRow] = []  # of the measurements so far
        self.not_begun = 0  # timings that are still to be started
        self.device = device
        self.model = str(loaded.request.model)
        input_size = loaded.convs.input_size
        if input_size is None:
            raise PlanError(f"{shortened(self.model)}: {loaded.convs.macs_note}")
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
        """Make all measurements. Yield the row of each as soon as it is done.

        Compiled networks come last, since compiling each one takes about a minute.
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
        """Return the rows so far, the package's choices so far, and the verdict on them."""
        name = str(self.device)
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return GpuReport(
            model=shortened(self.model),
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
        """Measure the largest error of matrix products for each map and dtype."""
        for channels, side in ACCURACY_MAPS:
            for dtype, max_error in MAX_ERROR.items():
                error = None
                problem = None
                try:
                    with full_precision(), forced_algorithm("matmul"):
                        error = largest_error(channels, side, dtype, self.device)
                except Exception as failure:  # finding failures of libraries is what this is for
                    problem = _reason(failure)
                if error is not None and not error <= max_error:  # also true for NaN
                    problem = f"wrong: {error:.1e}, where {max_error:g} is allowed"
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
        self, name: str, model: nn.Module, algorithm: Preference | None, work: Work
    ) -> _Case:
        return _Case(
            part="network",
            name=name,
            model=model,
            input=self.image,
            algorithm=algorithm,
            work=work,
        )

    def _layer_cases(self) -> list[_Case]:
        """Return cases of both algorithms for each distinct depthwise layer of the network."""
        cases = []
        for layer, maps in self._distinct_layers():
            size = f"{layer.in_channels} channels of {size_text(maps.shape[2:])}"
            name = f"{size}, {size_text(layer.dilated_kernel_size)}"
            for work in WORKS:
                for algorithm in ALGORITHMS:
                    case = _Case(
                        part="layer",
                        name=name,
                        model=layer,
                        input=maps,
                        algorithm=algorithm,
                        work=work,
                    )
                    cases.append(case)
        return cases

    def _distinct_layers(self) -> list[tuple[DclsConv2d, Tensor]]:
        """Return one depthwise layer of each kind, with its input for one image."""
        layers: dict[object, tuple[DclsConv2d, Tensor]] = {}

        def record_input(layer: Any, arguments: tuple[Tensor, ...]) -> None:
            maps = arguments[0]
            kind = (maps.shape, layer.dilated_kernel_size, layer.stride)
            if layer.groups == layer.in_channels:
                layers.setdefault(kind, (layer, maps))

        hooks = []
        for module in self.converted.modules():
            if isinstance(module, DclsConv2d):
                hooks.append(module.register_forward_pre_hook(record_input))
        forward_pass(self.converted, self.image, self.autocast)()
        for hook in hooks:
            hook.remove()
        return list(layers.values())

    def _timed_rows(self, case: _Case, batch: int) -> Iterator[GpuRow]:
        """Time a case. If memory is exhausted, yield that row and retry with half the batch."""
        while batch:
            row = self._timed_row(case, batch)
            yield row
            if row.problem != OUT_OF_MEMORY:
                return
            batch //= 2

    def _timed_row(self, case: _Case, batch: int) -> GpuRow:
        outcome: dict[str, Any]
        try:
            with forced_algorithm(case.algorithm or "auto"):
                outcome = self._time(case, batch)
        except Exception as failure:  # a library or compiler fails on this device: also a result
            outcome = {"problem": _reason(failure)}
        case.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return GpuRow(
            part=case.part,
            what=case.name,
            way=case.algorithm,
            work=case.work,
            batch=batch,
            **outcome,
        )

    def _time(self, case: _Case, batch: int) -> dict[str, float]:
        """Time a case, and return the measured fields of its row."""
        memory_format = torch.contiguous_format
        if is_channels_last(case.input):
            memory_format = torch.channels_last
        images = torch.randn(batch, *case.input.shape[1:], device=self.device)
        images = images.contiguous(memory_format=memory_format)
        # A layer inside a network also computes the gradient of its input.
        images.requires_grad_(case.part == "layer")
        make = forward_pass if case.work == "inference" else training_step
        call = make(case.model, images, self.autocast)
        call()  # initialises libraries, and compiles
        measured = {}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        first_ms = mean_device_milliseconds(call, 1, self.device)
        if self.device.type == "cuda":
            measured["peak_mib"] = torch.cuda.max_memory_allocated(self.device) / MIB
        calls = min(max(1, round(ROUND_MS / first_ms)), MAX_CALLS)
        rounds_ms = []
        for _ in range(ROUNDS):
            rounds_ms.append(mean_device_milliseconds(call, calls, self.device))
        ms = statistics.median(rounds_ms)
        return {**measured, "ms": ms, "images_per_second": 1e3 * batch / ms}


def gpu_device(name: str | None) -> torch.device:
    """Return the device of this name; None means the GPU.

    Raises:
        DclsConvertError: There is no such device.
    """
    if name is None and not torch.cuda.is_available():
        raise DclsConvertError(
            "torch finds no GPU here (CUDA or ROCm); --device names another device, "
            "and --device cpu tries this command with small batches"
        )
    return check_device(name or "cuda")


def verdict(rows: Sequence[GpuRow]) -> str:
    """Return one line of advice: do nothing, or override the package's choice of algorithms."""
    for row in rows:
        if row.part == "proof" and row.problem is not None:
            return f"matrix products are wrong or fail here; export {VARIABLE}=torch, and report it"
    timed = [row for row in rows if row.ms is not None]
    # By kind, since a retry with a smaller batch can give a batch size several rows.
    own_choices = {}
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
    """Return the largest relative error of a depthwise convolution and its gradients.

    The device's results are compared with float64 on the CPU, in Frobenius norms. The inputs are
    rounded to bfloat16, so they are the same in every dtype.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (ACCURACY_IMAGES, channels, side, side),
        (channels, 1, ACCURACY_WINDOW, ACCURACY_WINDOW),
        (ACCURACY_IMAGES, channels, side, side),
    )
    inputs = []
    for shape in shapes:
        inputs.append(torch.randn(shape, generator=generator).bfloat16().double())
    padding = ACCURACY_WINDOW // 2
    maps, kernel, grad = (tensor.to(dtype).to(device) for tensor in inputs)
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
    maps, kernel, grad = inputs
    output = F.conv2d(
        maps.requires_grad_(), kernel.requires_grad_(), padding=padding, groups=channels
    )
    expected = [output, *torch.autograd.grad(output, (maps, kernel), grad)]
    errors = []
    for result, reference in zip(results, expected, strict=True):
        errors.append((result.detach().cpu().double() - reference).norm() / reference.norm())
    return torch.stack(errors).max().item()  # NaN if any error is NaN


@contextlib.contextmanager
def forced_algorithm(algorithm: Preference) -> Iterator[None]:
    """Make depthwise layers use this algorithm inside the block.

    They read the environment variable in every forward pass.
    """
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
