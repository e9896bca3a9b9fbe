"""Check depthwise layers on a device, and time a network there. Each measurement is a row."""

import copy
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion.fold import fold_to_dense_
from ..conversion.loaded import LoadedNetwork
from ..conversion.resolved import resolve
from ..depthwise.choice import VARIABLE, Preference, choices
from ..depthwise.matmul import is_channels_last
from ..errors import DclsConvertError, PlanError
from ..geometry import size_text
from ..layers.dcls_conv import DclsConv2d
from ..networks.running import check_device
from ..text import shortened
from .gpu_accuracy import accuracy_rows, forced_algorithm
from .gpu_report import OUT_OF_MEMORY, GpuReport, GpuRow, Part, Work, failure_text, verdict
from .timing import converted_copy, forward_pass, mean_device_milliseconds, training_step

WORKS: tuple[Work, ...] = ("inference", "training")
ALGORITHMS: tuple[Preference, ...] = ("torch", "matmul")
GPU_BATCHES = (64, 8, 1)
CPU_BATCHES = (2, 1)  # small, since they only serve to try the command
ROUND_MS = 100.0
MAX_CALLS = 50  # per round
ROUNDS = 3
MIB = 2**20


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
        yield from accuracy_rows(self.device)
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

    def _network_cases(self) -> list[_Case]:
        cases = []
        for work in WORKS:
            cases.append(self._network_case("original", self.original, None, work))
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
            cases.append(self._network_case("original, compiled", original, None, work))
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
            outcome = {"problem": failure_text(failure)}
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
